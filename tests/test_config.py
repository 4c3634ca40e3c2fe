"""deviceplugin.config"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin import config
from deviceplugin.errors import ConfigError


def mistakes(
    flags: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
    file: str | None = None,
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.load(flags or {}, env or {}, None if file is None else ("c.yaml", file))
    return list(caught.value.mistakes)


def test_without_anything_the_documented_defaults_hold() -> None:
    settings = config.load({}, {}).settings
    assert settings.resource_name == "vendor.example/gpu"
    assert settings.device_plugin_dir == "/var/lib/kubelet/device-plugins"
    assert settings.metrics_address == "0.0.0.0:9451"
    assert settings.state_dir == "/var/lib/deviceplugin"
    assert settings.simulate is None


def test_a_flag_beats_the_environment_and_that_beats_the_file() -> None:
    file = ("c.yaml", "version: v1\nresourceName: a.b/file\nlogLevel: error\nsysfsRoot: /f")
    env = {"DEVICEPLUGIN_RESOURCE_NAME": "a.b/env", "DEVICEPLUGIN_LOG_LEVEL": "debug"}
    loaded = config.load({"resource_name": "a.b/flag"}, env, file)
    assert loaded.settings.resource_name == "a.b/flag"
    assert loaded.settings.log_level == "debug"
    assert loaded.settings.sysfs_root == "/f"
    assert loaded.origins["resource_name"] == "flag --resource-name"
    assert loaded.origins["log_level"] == "environment DEVICEPLUGIN_LOG_LEVEL"
    assert loaded.origins["sysfs_root"] == "file c.yaml"
    assert loaded.origins["proc_root"] == "default"


def test_node_name_comes_from_the_variable_that_pods_have_anyway() -> None:
    assert config.load({}, {"NODE_NAME": "n1"}).settings.node_name == "n1"
    both = {"NODE_NAME": "n1", "DEVICEPLUGIN_NODE_NAME": "n2"}
    assert config.load({}, both).settings.node_name == "n2"


def test_every_field_has_a_flag_a_variable_a_key_and_a_text() -> None:
    for field in config.FIELDS:
        assert field.flag.startswith("--")
        assert all(name.isupper() for name in field.envs)
        assert field.description
        assert field.metavar
    assert len({field.flag for field in config.FIELDS}) == len(config.FIELDS)


def test_an_empty_metrics_address_turns_it_off() -> None:
    assert config.load({}, {"DEVICEPLUGIN_METRICS_ADDRESS": ""}).settings.metrics_address == ""


def test_json_is_read_as_well_as_yaml() -> None:
    file = ("c.json", '{"version": "v1", "pollIntervalS": 1}')
    assert config.load({}, {}, file).settings.poll_interval_s == 1


def test_yaml_may_merge_what_stands_elsewhere() -> None:
    file = ("c.yaml", "<<: {version: v1, logLevel: debug, sysfsRoot: /a}\nsysfsRoot: /b\n")
    settings = config.load({}, {}, file).settings
    assert (settings.log_level, settings.sysfs_root) == ("debug", "/b")


def test_all_mistakes_are_reported_at_once_with_key_and_origin() -> None:
    found = mistakes(
        {"resource_name": "gpu", "poll_interval_s": "soon"},
        {"DEVICEPLUGIN_METRICS_ADDRESS": "here"},
        "version: v1\nlogLevel: loud\nsysfsRoot: 7\nresourcename: a.b/c\n",
    )
    assert found == [
        "file c.yaml: resourcename: unknown key; did you mean resourceName?",
        "file c.yaml: sysfsRoot: 7 is not of type 'string'",
        "file c.yaml: logLevel: 'loud' is not one of ['debug', 'error', 'info', 'warning']",
        "flag --resource-name: resourceName: 'gpu' needs a domain, as in 'vendor.example/gpu'",
        (
            "environment DEVICEPLUGIN_METRICS_ADDRESS: metricsAddress: 'here' must be HOST:PORT"
            " with a port from 0 to 65535"
        ),
        "flag --poll-interval: pollIntervalS: 'soon' is not a number of seconds",
    ]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "must hold keys and values, starting with 'version: v1'"),
        ("- a", "must hold keys and values, starting with 'version: v1'"),
        ("resourceName: a.b/c", "version: is missing; this release reads 'version: v1'"),
        ("version: v2", "version: is 'v2'; this release reads 'v1'"),
        ("version: v1\nstateDir: /a\nstateDir: /b", "line 3: stateDir: is set twice"),
        ("version: v1\nstateDir: null", "stateDir: None is not of type 'string'"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(text: str, mistake: str) -> None:
    assert f"file c.yaml: {mistake}" in mistakes(file=text)


@pytest.mark.parametrize("value", ['!!int ""', "!!bool 7", "!!float x", "[" * 5000, "&a [*a]"])
def test_what_yaml_itself_stumbles_over_is_a_mistake(value: str) -> None:
    assert mistakes(file=f"version: v1\nlogLevel: {value}")


def test_a_file_that_is_no_yaml_is_refused_with_the_place() -> None:
    (mistake,) = mistakes(file="version: v1\nlogLevel: [")
    assert mistake.startswith("file c.yaml: is neither YAML nor JSON: ")
    assert "line 2" in mistake


# Accepted and refused by the kubelet itself.
@pytest.mark.parametrize("name", ["vendor.example/gpu", "vendor.example/GPU_1.x"])
def test_names_that_the_kubelet_takes_are_good(name: str) -> None:
    assert config.check_resource_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "gpu",
        "kubernetes.io/gpu",
        "node.kubernetes.io/gpu",
        "requests.vendor.example/gpu",
        "vendor.example/a/b",
        "Vendor.Example/gpu",
        "vendor_example/gpu",
        "vendor.example/",
        "/gpu",
        "vendor.example/" + "g" * 64,
        "vendor.example/-gpu",
        "vendor.example/gpu\n",
    ],
)
def test_names_that_the_kubelet_refuses_are_mistakes(name: str) -> None:
    (mistake,) = mistakes({"resource_name": name})
    assert mistake.startswith("flag --resource-name: resourceName: ")


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("0.0.0.0:9451", ("0.0.0.0", 9451)),
        (":9451", ("0.0.0.0", 9451)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_addresses_are_host_and_port(address: str, parsed: tuple[str, int]) -> None:
    assert config.parse_address(address) == parsed


@pytest.mark.parametrize("address", ["9451", "a:b", "a:65536", "::1:9451", "a:-1", "a:²"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|brackets"):
        config.parse_address(address)


def test_a_directory_whose_sockets_would_have_too_long_paths_is_refused() -> None:
    longest = "/" + "d" * (107 - 1 - len("/vendor.example_gpu.0123abcd.sock"))
    assert config.load({"device_plugin_dir": longest}, {}).settings.device_plugin_dir == longest
    (mistake,) = mistakes({"device_plugin_dir": longest + "d"})
    assert "too long" in mistake


@pytest.mark.parametrize("value", ["0.05", "3601", "nan", "-1", "inf"])
def test_an_interval_out_of_range_is_refused(value: str) -> None:
    (mistake,) = mistakes({"poll_interval_s": value})
    assert "is not between 0.1 and 3600 seconds" in mistake


def test_control_of_simulated_gpus_needs_simulated_gpus() -> None:
    (mistake,) = mistakes({"simulate_control": "/run/c"})
    assert "set simulate too" in mistake
    assert config.load({"simulate_control": "/run/c", "simulate": "l4x1"}, {}).settings.simulate


def test_a_misspelt_variable_is_said_but_does_not_stop_the_daemon() -> None:
    loaded = config.load({}, {"DEVICEPLUGIN_RESOURCE_NAM": "a.b/c"})
    (warning,) = loaded.warnings
    assert warning == (
        "environment DEVICEPLUGIN_RESOURCE_NAM: no such setting, ignored;"
        " did you mean DEVICEPLUGIN_RESOURCE_NAME?"
    )


def test_variables_that_the_kubelet_sets_for_a_service_of_our_name_are_no_misspellings() -> None:
    env = {
        "DEVICEPLUGIN_SERVICE_HOST": "10.0.0.1",
        "DEVICEPLUGIN_PORT": "tcp://10.0.0.1:80",
        "DEVICEPLUGIN_PORT_80_TCP_ADDR": "10.0.0.1",
        "DEVICEPLUGIN_METRICS_SERVICE_PORT_HTTP": "9451",
    }
    assert config.load({}, env).warnings == ()


def test_the_schema_describes_every_key() -> None:
    schema = config.json_schema()
    section = schema["properties"].pop("health")
    keys = {*schema["properties"], *(f"health.{key}" for key in section["properties"])}
    assert keys == {"version", *(field.key for field in config.FIELDS)}
    assert section["additionalProperties"] is False
    assert schema["additionalProperties"] is False


@given(st.text(max_size=300))
def test_any_file_gives_settings_or_a_config_error(text: str) -> None:
    outcome: object
    try:
        outcome = config.load({}, {}, ("c.yaml", text))
    except ConfigError as error:
        outcome = error.mistakes
    assert outcome


@given(st.from_regex(r"[a-z]{1,60}(\.[a-z]{1,60}){0,3}/[A-Za-z0-9]{1,63}", fullmatch=True))
def test_socket_stems_are_short_file_names(name: str) -> None:
    stem = config.socket_stem(name)
    assert len(stem) <= 32
    assert "/" not in stem


def test_long_names_that_differ_at_the_end_get_different_stems() -> None:
    one, other = ("vendor.example/" + "g" * 60 + end for end in "ab")
    assert config.socket_stem(one) != config.socket_stem(other)


# --- sections -----------------------------------------------------------------------------------


def test_a_section_of_the_file_is_read() -> None:
    text = """
        version: v1
        health:
          mode: observe
          observe: [xid, inbox]
          holdDownS: 0
          maxUnhealthy: 2
          xids: {94: unhealthy, "13": ignore}
    """
    found = config.load({}, {}, ("f", text)).settings
    assert (found.health_mode, found.health_observe) == ("observe", ("xid", "inbox"))
    assert (found.health_hold_down_s, found.health_max_unhealthy) == (0, 2)
    assert found.health_xids == {"94": "unhealthy", "13": "ignore"}


def test_lists_tables_and_numbers_come_from_flags_and_variables_too() -> None:
    flags = {"health_observe": "fabric, inbox", "health_xids": "94=unhealthy,13=ignore"}
    env = {"DEVICEPLUGIN_HEALTH_MAX_UNHEALTHY": "3", "DEVICEPLUGIN_HEALTH_HOLD_DOWN": "5"}
    found = config.load(flags, env).settings
    assert found.health_observe == ("fabric", "inbox")
    assert found.health_xids == {"94": "unhealthy", "13": "ignore"}
    assert (found.health_max_unhealthy, found.health_hold_down_s) == (3, 5.0)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("{mod: observe}", "health.mod: unknown key; did you mean health.mode?"),
        ("{mode: loud}", "health.mode: 'loud' is not one of ['enforce', 'observe']"),
        ("7", "health: 7 is not of type 'object'"),
        ("{xids: {x: report}}", "health.xids: 'x' is no Xid code"),
        ("{xids: {94: kill}}", "health.xids.94: 'kill' is not one of"),
        ("{observe: [xid, moon]}", "health.observe.1: 'moon' is not one of"),
        ("{maxUnhealthy: -1}", "health.maxUnhealthy: -1 is no number of GPUs from 0 to 1000"),
        ("{holdDownS: 9999}", "health.holdDownS: 9999 is not between 0 and 3600 seconds"),
    ],
)
def test_what_is_wrong_in_a_section_is_named_with_its_path(text: str, mistake: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load({}, {}, ("f", f"version: v1\nhealth: {text}\n"))
    assert any(mistake in each for each in caught.value.mistakes), caught.value.mistakes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("health_max_unhealthy", "many"),
        ("health_xids", "94"),
        ("health_xids", "94=kill"),
        ("health_observe", "moon"),
    ],
)
def test_a_wrong_text_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match="flag --health"):
        config.load({name: text}, {})
