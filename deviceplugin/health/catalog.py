"""The Xid codes: what each means, what NVIDIA's catalog says to do, and our verdict. Pure.

Source of the actions: NVIDIA's Xid catalog, "immediate action", for Ampere and
newer; the words and the classes are ours. What follows from an action:

- IGNORE and RESTART_APP leave the GPU healthy: the program was at fault, or only
  the program is lost;
- a reset, a restart of machine or VM, or a support case make it unhealthy;
- the rest are decided one by one, in ``_DECIDED``, each with its reason.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Effect(enum.Enum):
    """What an Xid does; the first three are what a setting can ask for."""

    IGNORE = "ignore"
    """Counted."""
    REPORT = "report"
    """Counted and logged."""
    UNHEALTHY = "unhealthy"
    """The GPU is withdrawn."""
    ASK = "ask the driver"
    """Counted and logged, and the driver asked at once whether the GPU needs anything:
    its recovery action decides."""


class Cure(enum.Enum):
    """What ends a case; an operator who says "healthy" always does."""

    SOURCE = "its source says that it is over"
    RESET = "a sign of a reset, or a new boot"
    BOOT = "a new boot"
    WORD = "the operator's word"


@dataclass(frozen=True, slots=True)
class Xid:
    """What is known of one code.

    Attributes:
        action: the catalog's immediate action; "" when it names none.
        kind: application, memory, link, firmware, bus or informational.
        why: why the effect is not what follows from the action; "" when it does.
    """

    code: int
    action: str
    kind: str
    text: str
    effect: Effect
    cure: Cure = Cure.RESET
    why: str = ""


_FROM_ACTION: Final = {
    "IGNORE": Effect.IGNORE,
    "RESTART_APP": Effect.REPORT,
    "RESET_GPU": Effect.UNHEALTHY,
    "RESTART_BM": Effect.UNHEALTHY,
    "RESTART_VM": Effect.UNHEALTHY,
    "CONTACT_SUPPORT": Effect.UNHEALTHY,
}

_LINK5: Final = "about half of its forms are harmless, and a neighbour's reset raises it, too"

_DECIDED: Final = {
    45: (Effect.REPORT, "alone it is the end of a program; within 10 s of another it follows that"),
    48: (Effect.UNHEALTHY, "data in memory is wrong, and stays so until a reset"),
    54: (Effect.REPORT, "the GPU works, slowly, until somebody plugs the cable in"),
    74: (Effect.UNHEALTHY, "programs on several GPUs fail until the link is trained anew"),
    78: (Effect.REPORT, "a virtual machine did not get its GPU; the GPU itself is well"),
    **dict.fromkeys(range(144, 151), (Effect.ASK, _LINK5)),
    154: (Effect.ASK, "the event does not carry the action"),
    159: (Effect.REPORT, "the program that it hit is to be looked at"),
    162: (Effect.REPORT, "good news: it ends a 163"),
    163: (Effect.REPORT, "the GPU computes rightly; only its power draw is less even"),
    164: (Effect.REPORT, "a part wears out; the GPU works"),
    165: (Effect.REPORT, "as 163, for good"),
    166: (Effect.ASK, "whether the link is lost, the driver knows"),
    167: (Effect.UNHEALTHY, "nothing reaches the GPU until a reset"),
    168: (Effect.REPORT, "programs that need less memory run"),
    169: (Effect.UNHEALTHY, "as 110: its firmware has stopped until a reset"),
    170: (Effect.ASK, "whether the link is lost, the driver knows"),
    171: (Effect.REPORT, "it comes with a 48, which decides"),
    172: (Effect.REPORT, "it comes with a 48, which decides"),
}

_BOOT_ONLY: Final = frozenset({64})
"""Faults that a reset may hide and does not heal: spare rows are used up."""

ENDS: Final = {162: 163}
"""Codes that say that another one is over."""

FOLLOWS_WITHIN_S: Final = 10.0
FOLLOWERS: Final = frozenset({45, 171, 172})
"""Codes that mostly follow another one, and then say nothing of their own."""

_TABLE: Final = """\
8 | RESTART_APP | application | the GPU stopped processing a channel: it was idle for too long
11 | RESTART_APP | application | a command buffer was invalid or corrupt
13 | RESTART_APP | application | exception in the compute engine, mostly a program's fault
14 | IGNORE | informational | a fake error, raised by a test
25 | RESTART_APP | application | illegal or missing notifier of a channel
31 | RESTART_APP | application | a program accessed memory that is not mapped
32 | RESTART_APP | application | invalid or corrupt command stream
37 | IGNORE | firmware | context-switch firmware was given a method that it does not know
38 | IGNORE | firmware | the context-switch firmware's watchdog barked
39 | RESTART_APP | application | error in copy engine 0
40 | RESTART_APP | application | error in copy engine 1
41 | RESTART_APP | application | error in copy engine 2
43 | IGNORE | application | a program's channel was reset; other programs go on
44 | IGNORE | application | fault while contexts were switched
45 | WORKFLOW_XID_45 | application | channels removed early, as after a kill or another error
46 | RESET_GPU | firmware | the GPU stopped answering its driver in time
48 | WORKFLOW_XID_48 | memory | a memory error that could not be corrected (double bit)
54 | CHECK_MECHANICALS | bus | auxiliary power is not connected: clocks are reduced
60 | RESTART_APP | application | error in the security engine's channel
62 | RESET_GPU | firmware | the power-management controller halted
63 | IGNORE | memory | memory rows were, or are to be, remapped or pages retired
64 | RESET_GPU | memory | memory rows could not be remapped, or pages not retired
66 | IGNORE | application | illegal register access by a program
67 | IGNORE | application | context-switch verification failed
68 | RESTART_APP | application | exception in video decoder 0
69 | RESTART_APP | application | graphics engine class error
70 | RESTART_APP | application | error in copy engine 3
71 | RESTART_APP | application | error in copy engine 4
72 | RESTART_APP | application | error in copy engine 5
74 | WORKFLOW_NVLINK_ERR | link | NVLink error
75 | RESTART_APP | application | error in copy engine 6
76 | RESTART_APP | application | error in copy engine 7
77 | RESTART_APP | application | error in copy engine 8
78 | UPDATE_SWFW | application | a virtual GPU could not be started
79 | RESTART_BM | bus | the GPU has fallen off the bus
80 | RESTART_APP | application | corrupt data sent to the GPU
82 | RESTART_APP | application | error in JPEG engine 0
83 | RESTART_APP | application | error in video decoder 1
84 | RESTART_APP | application | error in video decoder 2
85 | RESTART_APP | application | error in copy engine 9
86 | RESTART_APP | application | error in optical-flow engine 0
88 | RESTART_APP | application | error in video decoder 3
89 | RESTART_APP | application | error in video decoder 4
92 | IGNORE | memory | many memory errors that were corrected (single bit)
93 | IGNORE | firmware | the configuration memory has been erased too often to be written
94 | RESTART_APP | memory | a memory error that was contained: only the program that it hit is lost
95 | RESET_GPU | memory | a memory error that was not contained: any program may be hit
96 | RESTART_APP | application | error in video decoder 5
97 | RESTART_APP | application | error in video decoder 6
98 | RESTART_APP | application | error in video decoder 7
99 | RESTART_APP | application | error in JPEG engine 1
100 | RESTART_APP | application | error in JPEG engine 2
101 | RESTART_APP | application | error in JPEG engine 3
102 | RESTART_APP | application | error in JPEG engine 4
103 | RESTART_APP | application | error in JPEG engine 5
104 | RESTART_APP | application | error in JPEG engine 6
105 | RESTART_APP | application | error in JPEG engine 7
106 | IGNORE | informational | test message of the management bus
107 | IGNORE | informational | silent test message of the management bus
108 | IGNORE | link | a translation error at the far end of an NVLink
109 | RESET_GPU | firmware | contexts could not be switched in time
110 | RESET_GPU | firmware | fault of the security processor
119 | RESET_GPU | firmware | the GPU's system processor did not answer in time
120 | RESET_GPU | firmware | error in the GPU's system processor
121 | IGNORE | link | error on the link between GPU and CPU that was corrected
126 | RESTART_APP | application | error in copy engine 10
127 | RESTART_APP | application | error in copy engine 11
128 | RESTART_APP | application | error in copy engine 12
129 | RESTART_APP | application | error in copy engine 13
130 | RESTART_APP | application | error in copy engine 14
131 | RESTART_APP | application | error in copy engine 15
132 | RESTART_APP | application | error in copy engine 16
133 | RESTART_APP | application | error in copy engine 17
134 | RESTART_APP | application | error in copy engine 18
135 | RESTART_APP | application | error in copy engine 19
136 | RESET_GPU | link | an NVLink could not be trained
137 | IGNORE | link | an NVLink error that another GPU or program caused
139 | RESTART_APP | application | error in optical-flow engine 1
140 | RESET_GPU | memory | memory errors that could not be corrected were left over
141 | IGNORE | application | error on the fast path of a channel
142 | CONTACT_SUPPORT | firmware | error in video encoder 3
143 | RESET_GPU | firmware | the GPU could not be initialised
144 | WORKFLOW_NVLINK5_ERR | link | NVLink 5 error, unit SAW (severity in the kernel log)
145 | WORKFLOW_NVLINK5_ERR | link | NVLink 5 error, unit RLW (severity in the kernel log)
146 | WORKFLOW_NVLINK5_ERR | link | NVLink 5 error, unit TLW (severity in the kernel log)
147 | WORKFLOW_NVLINK5_ERR | link | NVLink 5 error, unit TREX (severity in the kernel log)
148 | WORKFLOW_NVLINK5_ERR | link | NVLink 5 error, unit NVLPW control (severity in the kernel log)
149 | WORKFLOW_NVLINK5_ERR | link | NVLink 5 error, unit NETIR (severity in the kernel log)
150 | WORKFLOW_NVLINK5_ERR | link | NVLink 5 error, unit MSE (severity in the kernel log)
151 | RESTART_VM | firmware | encryption keys could not be rotated
152 | IGNORE | informational | memory translation error of the deep-learning accelerator
153 | IGNORE | informational | the deep-learning accelerator timed out
154 | XID_154 | informational | the driver's recovery action has changed
155 | RESET_GPU | link | NVLink error that the driver's software defines
156 | RESET_GPU | memory | a part of the GPU is to be taken out of use
157 | IGNORE | memory | a part of the GPU could not be taken out of use
158 | RESET_GPU | bus | fatal timeout inside the GPU
159 | CHECK_UVM | link | error on the coherent interface to the CPU
160 | IGNORE | memory | a memory channel is to be taken out of use
161 | IGNORE | memory | a memory channel could not be taken out of use
162 | - | informational | power smoothing works again
163 | - | informational | power smoothing is off
164 | - | informational | the power-smoothing circuit is near the end of its life
165 | - | informational | the power-smoothing circuit is at the end of its life
166 | - | link | encryption error on an NVLink
167 | - | bus | fatal timeout on the PCIe bus
168 | - | memory | the GPU runs with less memory than it was made with
169 | - | firmware | the security processor halted
170 | - | link | another error of NVLink encryption
171 | - | memory | where a Xid 48 was: in DRAM
172 | - | memory | where a Xid 48 was: in SRAM
"""


def _read() -> dict[int, Xid]:
    found = {}
    for line in _TABLE.splitlines():
        number, action, kind, text = line.split(" | ", 3)
        code = int(number)
        effect, why = _DECIDED.get(code) or (_FROM_ACTION[action], "")
        cure = Cure.BOOT if code in _BOOT_ONLY else Cure.RESET
        found[code] = Xid(code, action.strip("-"), kind, text, effect, cure, why)
    return found


CATALOG: Final = _read()
"""Every code that the catalog has for Ampere and newer."""


def lookup(code: int) -> Xid:
    """What is known of a code; one that is not in the catalog is only reported."""
    found = CATALOG.get(code)
    if found is not None:
        return found
    return Xid(code, "", "unknown", "not in the catalog for Ampere and newer", Effect.REPORT)
