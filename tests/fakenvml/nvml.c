/*
 * A fake libnvidia-ml.so.1: the driver's management library (NVML), acted from a script.
 *
 * A process under test loads it in place of the real one. The environment variable FAKE_NVML
 * names a directory; in it
 *
 *   script   says which GPUs there are and what goes wrong. It is read again at the first call
 *            after it changed, so replace it by rename, never in place. Without a script there is
 *            no driver: nvmlInit gives DRIVER_NOT_LOADED.
 *   events   is appended to; whole lines are delivered to who waits in nvmlEventSetWait.
 *   log      if it exists, gets a line per call: the function, then the GPU's number if any.
 *
 * The script has one statement a line. Words are separated by blanks; a blank or "%" inside a
 * word is written %20 or %25. A line that begins with "#" is a comment.
 *
 *   driver 550.54.15                 versions as the driver tells them
 *   nvml 12.550.54.15
 *   cuda 12040
 *   gpu 0 uuid=GPU-1 minor=0 name=NVIDIA%20H100 pci=00000000:1B:00.0 memory=85520809984
 *         used=0 mig=disabled|enabled|none temperature=40 events=all|xid|none|MASK
 *         action=0 remap=none|pending|failed fabric=STATE[/STATUS] errors=0 throttle=MASK
 *                                    (one line; all but uuid and pci may be left out)
 *   pcie 0 1 PIX                     their common ancestor: PSB PIX PXB PHB NODE SYS; else SYS
 *   nvlink 0 3 gpu 1                 link 3 of GPU 0 goes to GPU 1; a link not named is inactive
 *   nvlink 0 4 switch 00000000:05:00.0
 *   nvlink 0 5 down                  inactive; says, as every nvlink line, that GPU 0 has NVLink
 *   lost 2                           every call on GPU 2 gives GPU_IS_LOST
 *   sticky-lost off                  a lost GPU that comes back answers at once (see below)
 *   mismatch                         nvmlInit gives LIB_RM_VERSION_MISMATCH
 *   fail nvmlDeviceGetUUID code=999  the call gives this error
 *   slow nvmlDeviceGetUUID ms=50     the call takes longer
 *   hang nvmlDeviceGetUUID           the call never returns
 *   crash nvmlDeviceGetUUID          the call raises SIGSEGV
 *
 * The last four take  gpu=2    only calls on this GPU
 *                     after=3  from the third such call on
 *                     count=1  so many times
 *                     id=7     nothing: tells apart two lines that are otherwise alike
 * Calls are counted in each process; a line that stays as it is, word for word, goes on counting
 * when the script is read again.
 *
 * The events are
 *
 *   xid 0 79 [gi=1 ci=0]             an Xid error, of one MIG slice if so told; "none" for the GPU
 *                                    delivers it without a device
 *   event 0 2 17                     any other type, with its data
 *
 * A GPU's number in the script is its name here. The index that the driver gives is its place
 * among the gpu lines: the same, as long as the lines are numbered from 0.
 *
 * As with the real library: initialisation is counted; the GPUs and their indices stay those of
 * the first nvmlInit until the last nvmlShutdown; a GPU whose line goes away meanwhile is lost;
 * and a GPU once seen lost stays lost that long. Stricter than the real one: device handles and
 * event sets of an earlier initialisation are refused, so that code which keeps them is found out.
 *
 * A mistake in a script or an event aborts the process with a message, as it would otherwise be
 * taken for the behaviour of the code under test.
 *
 * To add a function: write it like its neighbours. ENTER_GPU makes it take part in faults, lost
 * GPUs and the log; nothing else needs to know it.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    LIB_RM_VERSION_MISMATCH = 18,
    NO_MEMORY = 20,
    ARGUMENT_VERSION_MISMATCH = 25,
};

enum { MAX_GPUS = 64, MAX_LINKS = 18, MAX_FAULTS = 256, MAX_WORDS = 24, NONE = -1 };
enum { REMOTE_GPU = 0x00, REMOTE_SWITCH = 0x02, REMOTE_UNKNOWN = 0xFF };
enum { MIG_DISABLED = 0, MIG_ENABLED = 1, MIG_NONE = 2 };
enum { REMAP_PENDING = 1, REMAP_FAILED = 2 };
enum { FIELD_RECOVERY_ACTION = 230, VALUE_UNSIGNED = 1, ERROR_UNCORRECTED = 1, COUNTER_VOLATILE = 0 };
enum { TOPOLOGY_INTERNAL = 0, TOPOLOGY_SYSTEM = 50 };
enum { SENSOR_GPU = 0 };

#define EVENT_XID 0x8ULL
#define EVENTS_ALL 0xE01FULL /* ECC, performance state, Xid, clocks, fatal poison, unavailable, action */
#define FABRIC_V2 0x02000024U
#define ANY_SLICE 0xFFFFFFFFU
#define MEMORY_V2 0x02000028U
#define TEMPERATURE_V1 0x0100000CU
#define DRIVER_VERSION "550.54.15"
#define NVML_VERSION "12.550.54.15"
#define CUDA_VERSION 12040
#define H100_PCI_ID 0x233010DEU /* device, then vendor, as NVML packs them */

/* The ABI, as the public header has it. Handles are opaque to the caller. */

typedef struct device *Device;
typedef struct opaque_set *EventSet;

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} PciInfo;

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;

typedef struct {
    unsigned version, sensor;
    int celsius;
} TemperatureV1;

typedef struct {
    unsigned field, scope;
    long long timestamp_us, latency_us;
    unsigned type;
    int rc;
    union {
        unsigned number;
        unsigned long long wide;
    } value;
} FieldValue;

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
} FabricV2;

typedef struct {
    Device device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} EventData;

/* What the script says. */

struct link {
    bool active;
    unsigned remote_type;
    int remote_gpu;
    char remote_pci[32];
};

struct gpu {
    bool present, lost, has_links;
    char uuid[80], name[96], pci[32];
    unsigned minor, mig;
    int celsius, action, remap, fabric, fabric_status; /* NONE: not supported */
    long long errors, throttle;
    unsigned long long memory, used, events;
    struct link links[MAX_LINKS];
};

struct fault {
    char text[256], function[64];
    enum { FAIL, SLOW, HANG, CRASH } kind;
    int code, gpu;
    unsigned long long ms, after, count, calls;
};

struct script {
    char driver[80], nvml[80];
    int cuda;
    bool mismatch, sticky_lost;
    struct gpu gpus[MAX_GPUS]; /* by number */
    int order[MAX_GPUS], gpu_count;
    unsigned char ancestor[MAX_GPUS][MAX_GPUS];
    struct fault faults[MAX_FAULTS];
    int fault_count;
};

/* What the process did so far. */

struct event {
    EventData data;
    struct event *next;
};

struct event_set {
    uintptr_t handle;
    unsigned long long wanted[MAX_GPUS]; /* by number */
    struct event *first, **last;
    int watch; /* of the file with the events, or -1 */
    struct event_set *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards all below; not held in waits */
static struct script *script;
static struct stat script_stat;
static struct {
    unsigned references, id;
    int gpus[MAX_GPUS], gpu_count; /* numbers, by the index that the driver gives */
    bool seen_lost[MAX_GPUS];      /* by number */
} session;
static struct event_set *event_sets;
static uintptr_t last_event_set;
static off_t events_offset;
static unsigned long events_line;
static ino_t events_inode;
static struct {
    const char *file;
    unsigned long line;
} reading; /* where to point to when a line makes no sense */

/* ---- reading words ---- */

static _Noreturn void malformed(const char *what, const char *word)
{
    fprintf(stderr, "fake NVML: %s, line %lu: %s: %s\n", reading.file, reading.line, what, word);
    abort();
}

static bool path_of(const char *name, char *path, size_t size)
{
    const char *directory = getenv("FAKE_NVML");
    return directory && (size_t)snprintf(path, size, "%s/%s", directory, name) < size;
}

static bool is(const char *a, const char *b)
{
    return strcmp(a, b) == 0;
}

static unsigned long long number(const char *word)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(word, &end, 0);
    if (!*word || *end || *word == '-' || errno)
        malformed("not a number", word);
    return value;
}

static int number_below(int limit, const char *word)
{
    unsigned long long value = number(word);
    if (value >= (unsigned long long)limit)
        malformed("too large", word);
    return (int)value;
}

static void copy(char *to, size_t size, const char *text)
{
    if ((size_t)snprintf(to, size, "%s", text) >= size)
        malformed("too long", text);
}

/* %20 and the like, in place */
static void unescape(char *word)
{
    char *to = word;
    for (const char *from = word; *from; from++) {
        if (*from == '%') {
            char hex[3] = {from[1], from[1] ? from[2] : '\0', '\0'}, *end;
            unsigned long character = strtoul(hex, &end, 16);
            if (end != hex + 2)
                malformed("bad escape", from);
            *to++ = (char)character;
            from += 2;
        } else {
            *to++ = *from;
        }
    }
    *to = '\0';
}

static int split(char *line, char **words)
{
    int count = 0;
    char *rest;
    for (char *from = line, *word; (word = strtok_r(from, " \t\r\n", &rest)); from = NULL) {
        if (count == 0 && *word == '#')
            break;
        if (count == MAX_WORDS)
            malformed("too many words", word);
        unescape(word);
        words[count++] = word;
    }
    return count;
}

/* Cuts "key=value" in two; the word is the key then. */
static char *value_of(char *word)
{
    char *equals = strchr(word, '=');
    if (!equals)
        malformed("not key=value", word);
    *equals = '\0';
    return equals + 1;
}

/* ---- reading the script ---- */

/* The number before a "/", and the one after it. */
static const char *split_status(char *value, int *status)
{
    char *slash = strchr(value, '/');
    if (slash) {
        *slash = '\0';
        *status = (int)number(slash + 1);
    }
    return value;
}

static void read_gpu(struct script *s, char **words, int count)
{
    int name = number_below(MAX_GPUS, words[1]);
    struct gpu *gpu = &s->gpus[name];
    if (gpu->present)
        malformed("the same GPU twice", words[1]);
    s->order[s->gpu_count++] = name;
    gpu->present = true;
    gpu->minor = (unsigned)name;
    gpu->events = EVENTS_ALL;
    gpu->action = gpu->remap = gpu->fabric = NONE;
    gpu->errors = gpu->throttle = NONE;
    copy(gpu->name, sizeof gpu->name, "NVIDIA H100 80GB HBM3");
    for (int i = 2; i < count; i++) {
        char *value = value_of(words[i]);
        if (is(words[i], "uuid"))
            copy(gpu->uuid, sizeof gpu->uuid, value);
        else if (is(words[i], "name"))
            copy(gpu->name, sizeof gpu->name, value);
        else if (is(words[i], "pci"))
            copy(gpu->pci, sizeof gpu->pci, value);
        else if (is(words[i], "minor"))
            gpu->minor = (unsigned)number(value);
        else if (is(words[i], "memory"))
            gpu->memory = number(value);
        else if (is(words[i], "used"))
            gpu->used = number(value);
        else if (is(words[i], "temperature"))
            gpu->celsius = (int)number(value);
        else if (is(words[i], "action"))
            gpu->action = (int)number(value);
        else if (is(words[i], "remap"))
            gpu->remap = is(value, "pending") ? REMAP_PENDING : is(value, "failed") ? REMAP_FAILED : 0;
        else if (is(words[i], "fabric"))
            gpu->fabric = (int)number(split_status(value, &gpu->fabric_status));
        else if (is(words[i], "throttle"))
            gpu->throttle = (long long)number(value);
        else if (is(words[i], "errors"))
            gpu->errors = (long long)number(value);
        else if (is(words[i], "mig") && is(value, "disabled"))
            gpu->mig = MIG_DISABLED;
        else if (is(words[i], "mig") && is(value, "enabled"))
            gpu->mig = MIG_ENABLED;
        else if (is(words[i], "mig") && is(value, "none"))
            gpu->mig = MIG_NONE;
        else if (is(words[i], "events"))
            gpu->events = is(value, "all")    ? EVENTS_ALL
                          : is(value, "xid")  ? EVENT_XID
                          : is(value, "none") ? 0
                                              : number(value);
        else
            malformed("unknown or bad value", words[i]);
    }
    if (!*gpu->uuid || !*gpu->pci)
        malformed("a GPU needs uuid= and pci=", words[1]);
}

static void read_pcie(struct script *s, char **words)
{
    static const struct {
        const char *name;
        unsigned char level;
    } levels[] = {{"PSB", TOPOLOGY_INTERNAL}, {"PIX", 10}, {"PXB", 20}, {"PHB", 30}, {"NODE", 40},
                  {"SYS", TOPOLOGY_SYSTEM}};
    int a = number_below(MAX_GPUS, words[1]), b = number_below(MAX_GPUS, words[2]);
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        if (is(words[3], levels[i].name)) {
            s->ancestor[a][b] = s->ancestor[b][a] = levels[i].level;
            return;
        }
    }
    malformed("unknown level", words[3]);
}

static void read_nvlink(struct script *s, char **words, int count)
{
    struct gpu *gpu = &s->gpus[number_below(MAX_GPUS, words[1])];
    struct link *link = &gpu->links[number_below(MAX_LINKS, words[2])];
    gpu->has_links = true;
    link->active = count == 5;
    if (count == 4 && is(words[3], "down")) {
        link->remote_type = REMOTE_UNKNOWN;
    } else if (count == 5 && is(words[3], "gpu")) {
        link->remote_type = REMOTE_GPU;
        link->remote_gpu = number_below(MAX_GPUS, words[4]);
    } else if (count == 5 && is(words[3], "switch")) {
        link->remote_type = REMOTE_SWITCH;
        copy(link->remote_pci, sizeof link->remote_pci, words[4]);
    } else {
        malformed("not gpu NUMBER, switch PCI or down", words[3]);
    }
}

static void read_fault(struct script *s, int kind, const char *text, char **words, int count)
{
    if (s->fault_count == MAX_FAULTS)
        malformed("too many faults", words[0]);
    struct fault *fault = &s->faults[s->fault_count++];
    *fault = (struct fault){.kind = kind, .gpu = NONE, .after = 1, .count = UINT64_MAX};
    copy(fault->text, sizeof fault->text, text);
    copy(fault->function, sizeof fault->function, words[1]);
    for (int i = 2; i < count; i++) {
        const char *value = value_of(words[i]);
        if (is(words[i], "gpu"))
            fault->gpu = number_below(MAX_GPUS, value);
        else if (is(words[i], "after"))
            fault->after = number(value);
        else if (is(words[i], "count"))
            fault->count = number(value);
        else if (is(words[i], "code") && kind == FAIL)
            fault->code = (int)number(value);
        else if (is(words[i], "ms") && kind == SLOW)
            fault->ms = number(value);
        else if (!is(words[i], "id"))
            malformed("unknown key", words[i]);
    }
    if (kind == FAIL && fault->code == OK)
        malformed("fail needs code=", words[1]);
    if (kind == SLOW && fault->ms == 0)
        malformed("slow needs ms=", words[1]);
}

static void read_line(struct script *s, char *line)
{
    char text[256], *words[MAX_WORDS];
    snprintf(text, sizeof text, "%s", line);
    int count = split(line, words);
    if (count == 0)
        return;
    if (is(words[0], "driver") && count == 2)
        copy(s->driver, sizeof s->driver, words[1]);
    else if (is(words[0], "nvml") && count == 2)
        copy(s->nvml, sizeof s->nvml, words[1]);
    else if (is(words[0], "cuda") && count == 2)
        s->cuda = (int)number(words[1]);
    else if (is(words[0], "gpu") && count > 2)
        read_gpu(s, words, count);
    else if (is(words[0], "pcie") && count == 4)
        read_pcie(s, words);
    else if (is(words[0], "nvlink") && count > 3)
        read_nvlink(s, words, count);
    else if (is(words[0], "lost") && count == 2)
        s->gpus[number_below(MAX_GPUS, words[1])].lost = true;
    else if (is(words[0], "sticky-lost") && count == 2 && is(words[1], "on"))
        s->sticky_lost = true;
    else if (is(words[0], "sticky-lost") && count == 2 && is(words[1], "off"))
        s->sticky_lost = false;
    else if (is(words[0], "mismatch") && count == 1)
        s->mismatch = true;
    else if (is(words[0], "fail") && count > 1)
        read_fault(s, FAIL, text, words, count);
    else if (is(words[0], "slow") && count > 1)
        read_fault(s, SLOW, text, words, count);
    else if (is(words[0], "hang") && count > 1)
        read_fault(s, HANG, text, words, count);
    else if (is(words[0], "crash") && count > 1)
        read_fault(s, CRASH, text, words, count);
    else
        malformed("unknown statement, or not its number of words", words[0]);
}

static struct script *read_script(FILE *file)
{
    struct script *s = calloc(1, sizeof *s);
    if (!s)
        abort();
    copy(s->driver, sizeof s->driver, DRIVER_VERSION);
    copy(s->nvml, sizeof s->nvml, NVML_VERSION);
    s->cuda = CUDA_VERSION;
    s->sticky_lost = true;
    memset(s->ancestor, TOPOLOGY_SYSTEM, sizeof s->ancestor);
    char *line = NULL;
    size_t size = 0;
    reading.file = "script";
    for (reading.line = 1; getline(&line, &size, file) >= 0; reading.line++)
        read_line(s, line);
    free(line);
    return s;
}

static void carry_counters(struct script *to, const struct script *from)
{
    for (int i = 0; from && i < from->fault_count; i++)
        for (int j = 0; j < to->fault_count; j++)
            if (is(from->faults[i].text, to->faults[j].text))
                to->faults[j].calls = from->faults[i].calls;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static void refresh_script(void)
{
    char path[4096];
    struct stat now;
    if (!path_of("script", path, sizeof path) || stat(path, &now) != 0)
        return;
    if (script && same_file(&now, &script_stat))
        return;
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    fstat(fileno(file), &script_stat);
    struct script *s = read_script(file);
    fclose(file);
    carry_counters(s, script);
    free(script);
    script = s;
}

/* ---- entering and leaving a call ---- */

static void lock(void)
{
    pthread_mutex_lock(&mutex);
    refresh_script();
}

static int leave(int rc)
{
    pthread_mutex_unlock(&mutex);
    return rc;
}

static void log_call(const char *function, int gpu)
{
    char path[4096], line[128];
    if (!path_of("log", path, sizeof path))
        return;
    int file = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (file < 0)
        return;
    int size = gpu == NONE ? snprintf(line, sizeof line, "%s\n", function)
                           : snprintf(line, sizeof line, "%s %d\n", function, gpu);
    if (write(file, line, (size_t)size) != size)
        abort();
    close(file);
}

static void sleep_ms(unsigned long long ms)
{
    struct timespec rest = {.tv_sec = (time_t)(ms / 1000), .tv_nsec = (long)(ms % 1000) * 1000000};
    while (nanosleep(&rest, &rest) != 0 && errno == EINTR)
        ;
}

/*
 * The one place where faults happen. Called with the lock held and returns with it held, but lets
 * go of it meanwhile: what was looked up before must be looked up again.
 */
static int enter_uninitialized(const char *function, int gpu, int other)
{
    log_call(function, gpu);
    int code = OK;
    unsigned long long ms = 0;
    bool hang = false, crash = false;
    for (int i = 0; script && i < script->fault_count; i++) {
        struct fault *fault = &script->faults[i];
        if (!is(fault->function, function))
            continue;
        if (fault->gpu != NONE && fault->gpu != gpu && fault->gpu != other)
            continue;
        fault->calls++;
        if (fault->calls < fault->after || fault->calls - fault->after >= fault->count)
            continue;
        if (fault->kind == FAIL && code == OK)
            code = fault->code;
        ms += fault->ms;
        hang = hang || fault->kind == HANG;
        crash = crash || fault->kind == CRASH;
    }
    if (ms || hang || crash) {
        leave(OK);
        sleep_ms(ms);
        while (hang)
            pause();
        if (crash)
            raise(SIGSEGV);
        lock();
    }
    return code;
}

static int enter(const char *function, int gpu, int other)
{
    int rc = enter_uninitialized(function, gpu, other);
    return session.references ? rc : UNINITIALIZED;
}

/* A handle holds no pointer, only numbers: a wrong one is refused and never followed. */
static Device handle_of(int index)
{
    return (Device)(((uintptr_t)session.id << 12) + ((uintptr_t)index << 4) + 8);
}

static int index_of(Device device)
{
    for (int index = 0; session.references && index < session.gpu_count; index++)
        if (device == handle_of(index))
            return index;
    return NONE;
}

static int number_of(Device device)
{
    int index = index_of(device);
    return index == NONE ? NONE : session.gpus[index];
}

static int index_of_number(int gpu)
{
    for (int index = 0; index < session.gpu_count; index++)
        if (session.gpus[index] == gpu)
            return index;
    return NONE;
}

static int usable(int gpu)
{
    if (gpu == NONE)
        return INVALID_ARGUMENT;
    if (script->gpus[gpu].lost || !script->gpus[gpu].present)
        session.seen_lost[gpu] = true;
    else if (!script->sticky_lost)
        session.seen_lost[gpu] = false;
    return session.seen_lost[gpu] ? GPU_IS_LOST : OK;
}

static int enter_gpu(const char *function, Device device, const struct gpu **gpu)
{
    lock();
    int rc = enter(function, number_of(device), NONE);
    if (rc == OK)
        rc = usable(number_of(device));
    if (rc == OK)
        *gpu = &script->gpus[number_of(device)];
    return rc;
}

/* Begins a function on one GPU. From here to leave() the lock is held and gpu can be read. */
#define ENTER_GPU(gpu, device, arguments_are_good)                                                 \
    const struct gpu *gpu = NULL;                                                                  \
    do {                                                                                           \
        int entered = enter_gpu(__func__, device, &gpu);                                           \
        if (entered == OK && !(arguments_are_good))                                                \
            entered = INVALID_ARGUMENT;                                                            \
        if (entered != OK)                                                                         \
            return leave(entered);                                                                 \
    } while (0)

static int answer(char *to, unsigned size, const char *text)
{
    if (!to)
        return INVALID_ARGUMENT;
    if (size <= strlen(text))
        return INSUFFICIENT_SIZE;
    memcpy(to, text, strlen(text) + 1);
    return OK;
}

/* ---- the library: initialisation and the system ---- */

static int initialize(const char *function)
{
    lock();
    int rc = enter_uninitialized(function, NONE, NONE);
    if (rc == OK && session.references == 0) {
        if (!script)
            return leave(DRIVER_NOT_LOADED);
        if (script->mismatch)
            return leave(LIB_RM_VERSION_MISMATCH);
        session.id++;
        session.gpu_count = script->gpu_count;
        memcpy(session.gpus, script->order, sizeof session.gpus);
        memset(session.seen_lost, 0, sizeof session.seen_lost);
    }
    if (rc == OK)
        session.references++;
    return leave(rc);
}

int nvmlInit_v2(void)
{
    return initialize(__func__);
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return initialize(__func__);
}

static void free_event_set(struct event_set **place)
{
    struct event_set *set = *place;
    *place = set->next;
    for (struct event *event = set->first, *next; event; event = next) {
        next = event->next;
        free(event);
    }
    if (set->watch >= 0)
        close(set->watch);
    free(set);
}

int nvmlShutdown(void)
{
    lock();
    int rc = enter(__func__, NONE, NONE);
    if (rc == OK && --session.references == 0)
        while (event_sets)
            free_event_set(&event_sets);
    return leave(rc);
}

const char *nvmlErrorString(int code)
{
    static const struct {
        int code;
        const char *text;
    } texts[] = {
        {OK, "Success"},
        {UNINITIALIZED, "Uninitialized"},
        {INVALID_ARGUMENT, "Invalid Argument"},
        {NOT_SUPPORTED, "Not Supported"},
        {4, "Insufficient Permissions"},
        {NOT_FOUND, "Not Found"},
        {INSUFFICIENT_SIZE, "Insufficient Size"},
        {8, "Insufficient External Power"},
        {DRIVER_NOT_LOADED, "Driver Not Loaded"},
        {TIMEOUT, "Timeout"},
        {11, "Interrupt Request Issue"},
        {12, "NVML Shared Library Not Found"},
        {13, "Function Not Found"},
        {14, "Corrupted infoROM"},
        {GPU_IS_LOST, "GPU is lost"},
        {16, "GPU requires reset"},
        {17, "The operating system has blocked the request"},
        {LIB_RM_VERSION_MISMATCH, "RM has detected an NVML/RM version mismatch"},
        {19, "The GPU is currently in use"},
        {NO_MEMORY, "Insufficient Memory"},
        {ARGUMENT_VERSION_MISMATCH, "Argument version mismatch"},
    };
    const char *text = "Unknown Error";
    lock();
    enter_uninitialized(__func__, NONE, NONE);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].code == code)
            text = texts[i].text;
    leave(OK);
    return text;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    lock();
    int rc = enter(__func__, NONE, NONE);
    return leave(rc == OK ? answer(version, size, script->driver) : rc);
}

/* Works without initialisation: nvidia-smi names this version when nvmlInit gives a mismatch. */
int nvmlSystemGetNVMLVersion(char *version, unsigned size)
{
    lock();
    int rc = enter_uninitialized(__func__, NONE, NONE);
    return leave(rc == OK ? answer(version, size, script ? script->nvml : NVML_VERSION) : rc);
}

static int cuda_version(const char *function, int *version)
{
    lock();
    int rc = enter(function, NONE, NONE);
    if (rc == OK && !version)
        rc = INVALID_ARGUMENT;
    if (rc == OK)
        *version = script->cuda;
    return leave(rc);
}

int nvmlSystemGetCudaDriverVersion(int *version)
{
    return cuda_version(__func__, version);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return cuda_version(__func__, version);
}

/* ---- the library: finding devices ---- */

int nvmlDeviceGetCount_v2(unsigned *count)
{
    lock();
    int rc = enter(__func__, NONE, NONE);
    if (rc == OK && !count)
        rc = INVALID_ARGUMENT;
    if (rc == OK)
        *count = (unsigned)session.gpu_count;
    return leave(rc);
}

static int give_handle(int gpu, Device *device)
{
    int rc = usable(gpu);
    if (rc == OK)
        *device = handle_of(index_of_number(gpu));
    return leave(rc);
}

static int number_at(unsigned index)
{
    return session.references && index < (unsigned)session.gpu_count ? session.gpus[index] : NONE;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device)
{
    lock();
    int rc = enter(__func__, number_at(index), NONE);
    if (rc == OK && !device)
        rc = INVALID_ARGUMENT;
    return rc == OK ? give_handle(number_at(index), device) : leave(rc);
}

static bool has_uuid(const struct gpu *gpu, const char *uuid)
{
    return is(gpu->uuid, uuid);
}

static bool read_pci(const char *text, unsigned *domain, unsigned *bus, unsigned *device)
{
    unsigned function;
    if (sscanf(text, "%x:%x:%x.%x", domain, bus, device, &function) == 4)
        return true;
    *domain = 0;
    return sscanf(text, "%x:%x.%x", bus, device, &function) == 3;
}

static bool has_pci(const struct gpu *gpu, const char *text)
{
    unsigned domain, bus, device, wanted_domain, wanted_bus, wanted_device;
    return read_pci(gpu->pci, &domain, &bus, &device) &&
           read_pci(text, &wanted_domain, &wanted_bus, &wanted_device) &&
           domain == wanted_domain && bus == wanted_bus && device == wanted_device;
}

static int find(bool (*matches)(const struct gpu *, const char *), const char *text)
{
    for (int index = 0; text && session.references && index < session.gpu_count; index++)
        if (matches(&script->gpus[session.gpus[index]], text))
            return session.gpus[index];
    return NONE;
}

static int handle_by(const char *function, bool (*matches)(const struct gpu *, const char *),
                     const char *text, Device *device)
{
    lock();
    int rc = enter(function, find(matches, text), NONE);
    if (rc == OK && (!text || !device))
        rc = INVALID_ARGUMENT;
    else if (rc == OK && find(matches, text) == NONE)
        rc = NOT_FOUND;
    return rc == OK ? give_handle(find(matches, text), device) : leave(rc);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device)
{
    return handle_by(__func__, has_uuid, uuid, device);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Device *device)
{
    return handle_by(__func__, has_pci, bus_id, device);
}

/* ---- the library: one device ---- */

int nvmlDeviceGetIndex(Device device, unsigned *index)
{
    ENTER_GPU(gpu, device, index);
    *index = (unsigned)index_of(device);
    return leave(OK);
}

int nvmlDeviceGetUUID(Device device, char *uuid, unsigned size)
{
    ENTER_GPU(gpu, device, true);
    return leave(answer(uuid, size, gpu->uuid));
}

int nvmlDeviceGetMinorNumber(Device device, unsigned *minor)
{
    ENTER_GPU(gpu, device, minor);
    *minor = gpu->minor;
    return leave(OK);
}

int nvmlDeviceGetName(Device device, char *name, unsigned size)
{
    ENTER_GPU(gpu, device, true);
    return leave(answer(name, size, gpu->name));
}

static int fill_pci(PciInfo *to, const char *text, unsigned pci_device_id)
{
    unsigned domain, bus, device;
    if (!read_pci(text, &domain, &bus, &device))
        return NOT_FOUND;
    *to = (PciInfo){.domain = domain, .bus = bus, .device = device};
    to->pci_device_id = pci_device_id;
    snprintf(to->bus_id, sizeof to->bus_id, "%08X:%02X:%02X.0", domain, bus, device);
    snprintf(to->bus_id_legacy, sizeof to->bus_id_legacy, "%04X:%02X:%02X.0", domain, bus, device);
    return OK;
}

int nvmlDeviceGetPciInfo_v3(Device device, PciInfo *info)
{
    ENTER_GPU(gpu, device, info);
    return leave(fill_pci(info, gpu->pci, H100_PCI_ID));
}

int nvmlDeviceGetMemoryInfo(Device device, Memory *memory)
{
    ENTER_GPU(gpu, device, memory);
    *memory = (Memory){.total = gpu->memory, .free = gpu->memory - gpu->used, .used = gpu->used};
    return leave(OK);
}

int nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2 *memory)
{
    ENTER_GPU(gpu, device, memory);
    if (memory->version != MEMORY_V2)
        return leave(ARGUMENT_VERSION_MISMATCH);
    memory->total = gpu->memory;
    memory->reserved = 0;
    memory->free = gpu->memory - gpu->used;
    memory->used = gpu->used;
    return leave(OK);
}

int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending)
{
    ENTER_GPU(gpu, device, current && pending);
    if (gpu->mig == MIG_NONE)
        return leave(NOT_SUPPORTED);
    *current = *pending = gpu->mig;
    return leave(OK);
}

int nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned *celsius)
{
    ENTER_GPU(gpu, device, celsius && sensor == SENSOR_GPU);
    *celsius = (unsigned)gpu->celsius;
    return leave(OK);
}

int nvmlDeviceGetFieldValues(Device device, int count, FieldValue *values)
{
    ENTER_GPU(gpu, device, values && count > 0);
    for (int i = 0; i < count; i++) {
        bool known = values[i].field == FIELD_RECOVERY_ACTION && gpu->action != NONE;
        values[i].rc = known ? OK : NOT_SUPPORTED;
        values[i].type = VALUE_UNSIGNED;
        values[i].value.wide = 0;
        values[i].value.number = known ? (unsigned)gpu->action : 0;
    }
    return leave(OK);
}

int nvmlDeviceGetRemappedRows(Device device, unsigned *corrected, unsigned *uncorrected,
                              unsigned *pending, unsigned *failed)
{
    ENTER_GPU(gpu, device, corrected && uncorrected && pending && failed);
    if (gpu->remap == NONE)
        return leave(NOT_SUPPORTED);
    *corrected = *uncorrected = 0;
    *pending = gpu->remap == REMAP_PENDING;
    *failed = gpu->remap == REMAP_FAILED;
    return leave(OK);
}

int nvmlDeviceGetGpuFabricInfoV(Device device, FabricV2 *info)
{
    ENTER_GPU(gpu, device, info);
    if (info->version != FABRIC_V2)
        return leave(ARGUMENT_VERSION_MISMATCH);
    if (gpu->fabric == NONE)
        return leave(NOT_SUPPORTED);
    info->state = (unsigned char)gpu->fabric;
    info->status = gpu->fabric_status;
    return leave(OK);
}

int nvmlDeviceGetTotalEccErrors(Device device, unsigned type, unsigned counter,
                                unsigned long long *count)
{
    ENTER_GPU(gpu, device, count && type == ERROR_UNCORRECTED && counter == COUNTER_VOLATILE);
    if (gpu->errors == NONE)
        return leave(NOT_SUPPORTED);
    *count = (unsigned long long)gpu->errors;
    return leave(OK);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *reasons)
{
    ENTER_GPU(gpu, device, reasons);
    if (gpu->throttle == NONE)
        return leave(NOT_SUPPORTED);
    *reasons = (unsigned long long)gpu->throttle;
    return leave(OK);
}

int nvmlDeviceGetTemperatureV(Device device, TemperatureV1 *temperature)
{
    ENTER_GPU(gpu, device, temperature && temperature->sensor == SENSOR_GPU);
    if (temperature->version != TEMPERATURE_V1)
        return leave(ARGUMENT_VERSION_MISMATCH);
    temperature->celsius = gpu->celsius;
    return leave(OK);
}

/* ---- the library: what connects devices ---- */

int nvmlDeviceGetTopologyCommonAncestor(Device a, Device b, unsigned *level)
{
    lock();
    int rc = enter(__func__, number_of(a), number_of(b));
    if (rc == OK)
        rc = usable(number_of(a));
    if (rc == OK)
        rc = usable(number_of(b));
    if (rc == OK && !level)
        rc = INVALID_ARGUMENT;
    if (rc == OK)
        *level = a == b ? TOPOLOGY_INTERNAL : script->ancestor[number_of(a)][number_of(b)];
    return leave(rc);
}

int nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned *active)
{
    ENTER_GPU(gpu, device, link < MAX_LINKS && active);
    if (!gpu->has_links)
        return leave(NOT_SUPPORTED);
    *active = gpu->links[link].active;
    return leave(OK);
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, unsigned link, PciInfo *info)
{
    ENTER_GPU(gpu, device, link < MAX_LINKS && info);
    const struct link *remote = &gpu->links[link];
    if (!remote->active)
        return leave(NOT_SUPPORTED);
    if (remote->remote_type == REMOTE_GPU)
        return leave(fill_pci(info, script->gpus[remote->remote_gpu].pci, H100_PCI_ID));
    return leave(fill_pci(info, remote->remote_pci, 0));
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Device device, unsigned link, unsigned *type)
{
    ENTER_GPU(gpu, device, link < MAX_LINKS && type);
    if (!gpu->has_links)
        return leave(NOT_SUPPORTED);
    *type = gpu->links[link].active ? gpu->links[link].remote_type : REMOTE_UNKNOWN;
    return leave(OK);
}

/* ---- the library: events ---- */

static void deliver(int gpu, const EventData *data)
{
    for (struct event_set *set = event_sets; set; set = set->next) {
        unsigned long long wanted = 0;
        for (int i = 0; i < MAX_GPUS; i++)
            if (gpu == NONE || gpu == i)
                wanted |= set->wanted[i];
        if (!(wanted & data->type))
            continue;
        struct event *event = malloc(sizeof *event);
        if (!event)
            abort();
        *event = (struct event){.data = *data};
        *set->last = event;
        set->last = &event->next;
    }
}

static void read_event(char *line)
{
    char *words[MAX_WORDS];
    int count = split(line, words);
    if (count == 0)
        return;
    bool xid = is(words[0], "xid");
    int plain = xid ? 3 : 4;
    if ((!xid && !is(words[0], "event")) || count < plain)
        malformed("unknown event, or too few words", words[0]);
    int gpu = is(words[1], "none") ? NONE : number_below(MAX_GPUS, words[1]);
    EventData data = {
        .type = xid ? EVENT_XID : number(words[2]),
        .data = number(words[plain - 1]),
        .gpu_instance = ANY_SLICE,
        .compute_instance = ANY_SLICE,
    };
    for (int i = plain; i < count; i++) {
        const char *value = value_of(words[i]);
        if (is(words[i], "gi"))
            data.gpu_instance = (unsigned)number(value);
        else if (is(words[i], "ci"))
            data.compute_instance = (unsigned)number(value);
        else
            malformed("unknown key", words[i]);
    }
    if (gpu != NONE && index_of_number(gpu) != NONE)
        data.device = handle_of(index_of_number(gpu));
    deliver(gpu, &data);
}

/* Hands the whole lines that were appended since the last time to the sets that want them. */
static void pump_events(void)
{
    char path[4096];
    if (!path_of("events", path, sizeof path))
        return;
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    struct stat now;
    fstat(fileno(file), &now);
    if (now.st_ino != events_inode || now.st_size < events_offset) {
        events_offset = 0;
        events_line = 0;
    }
    events_inode = now.st_ino;
    char *line = NULL;
    size_t size = 0;
    ssize_t length;
    fseeko(file, events_offset, SEEK_SET);
    reading.file = "events";
    while ((length = getline(&line, &size, file)) > 0 && line[length - 1] == '\n') {
        events_offset += length;
        reading.line = ++events_line;
        read_event(line);
    }
    free(line);
    fclose(file);
}

static struct event_set **place_of(EventSet set)
{
    struct event_set **place = &event_sets;
    while (*place && (EventSet)(*place)->handle != set)
        place = &(*place)->next;
    return *place ? place : NULL;
}

/* A watch lives as long as its set: to close one takes the kernel tens of milliseconds. */
static int watch_events(void)
{
    char path[4096];
    int watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (watch < 0)
        return watch;
    if (path_of("events", path, sizeof path) && inotify_add_watch(watch, path, IN_MODIFY) >= 0)
        return watch;
    close(watch);
    return -1;
}

int nvmlEventSetCreate(EventSet *set)
{
    lock();
    int rc = enter(__func__, NONE, NONE);
    if (rc == OK && !set)
        rc = INVALID_ARGUMENT;
    if (rc == OK) {
        struct event_set *made = calloc(1, sizeof *made);
        if (!made)
            return leave(NO_MEMORY);
        made->handle = ++last_event_set;
        made->last = &made->first;
        made->watch = watch_events();
        made->next = event_sets;
        event_sets = made;
        *set = (EventSet)made->handle;
    }
    return leave(rc);
}

int nvmlDeviceGetSupportedEventTypes(Device device, unsigned long long *types)
{
    ENTER_GPU(gpu, device, types);
    *types = gpu->events;
    return leave(OK);
}

int nvmlDeviceRegisterEvents(Device device, unsigned long long types, EventSet set)
{
    ENTER_GPU(gpu, device, types && place_of(set));
    if (types & ~gpu->events)
        return leave(NOT_SUPPORTED);
    pump_events(); /* what happened before is not for this registration */
    (*place_of(set))->wanted[number_of(device)] |= types;
    return leave(OK);
}

static long long now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Sleeps until an event was written, or until it is time to look whether the set is still there. */
static void await_write(int watch, long long rest_ns)
{
    char notices[4096];
    long long look_ms = watch < 0 ? 5 : 100, rest_ms = (rest_ns + 999999) / 1000000;
    struct pollfd polled = {.fd = watch, .events = POLLIN};
    poll(&polled, 1, (int)(rest_ms < look_ms ? rest_ms : look_ms));
    while (watch >= 0 && read(watch, notices, sizeof notices) > 0)
        ;
}

static bool take_event(struct event_set *set, EventData *data)
{
    struct event *event = set->first;
    if (!event)
        return false;
    *data = event->data;
    set->first = event->next;
    if (!set->first)
        set->last = &set->first;
    free(event);
    return true;
}

int nvmlEventSetWait_v2(EventSet set, EventData *data, unsigned timeout_ms)
{
    lock();
    int rc = enter(__func__, NONE, NONE);
    long long deadline_ns = now_ns() + timeout_ms * 1000000LL;
    while (rc == OK) {
        if (!session.references)
            rc = UNINITIALIZED;
        else if (!data || !place_of(set))
            rc = INVALID_ARGUMENT;
        else {
            pump_events();
            if (take_event(*place_of(set), data))
                break;
            long long rest_ns = deadline_ns - now_ns();
            if (rest_ns <= 0) {
                rc = TIMEOUT;
            } else {
                int watch = (*place_of(set))->watch;
                leave(OK);
                await_write(watch, rest_ns); /* a line since the look has left its notice there */
                lock();
            }
        }
    }
    return leave(rc);
}

int nvmlEventSetFree(EventSet set)
{
    lock();
    int rc = enter(__func__, NONE, NONE);
    if (rc == OK && !place_of(set))
        rc = INVALID_ARGUMENT;
    if (rc == OK)
        free_event_set(place_of(set));
    return leave(rc);
}
