// Test double of the driver, with devices on the CPU: memory, copies, fences and virtual memory are real,
// kernels are only logged. All streams are one lazy queue: work runs when a call waits for it, one command for
// each query, so that a missing wait for the device shows. Waits of one device for another are only logged, and
// so is the path of a copy between two devices.
//
// Environment variables: FAKE_CUDA_VERSION, FAKE_CUDA_DEVICES, FAKE_CUDA_VMM=0, FAKE_CUDA_MEMORY (bytes),
// FAKE_CUDA_LINK=0 (no device may access another one's memory),
// FAKE_CUDA_LOG (a file that gets one line for each call), FAKE_CUDA_LAUNCH_US (microseconds of a launch),
// FAKE_CUDA_PARAMS (the sizes of a kernel's parameters, "8,8,16"). FAKE_CUDA_FAIL="cuMemMap:2:3" makes the third call of cuMemMap return 2; codes from
// 700 to 799 are sticky.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint64_t Address;
enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_IMAGE = 200, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, PEER_ACCESS_ALREADY_ENABLED = 704 };

// ---- environment and log ----

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? strtol(text, NULL, 10) : otherwise;
}

static void note(const char *format, ...) {
    static FILE *file;
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; // the compiler's threads log too
    const char *path = getenv("FAKE_CUDA_LOG");
    pthread_mutex_lock(&mutex);
    if (path && (file || (file = fopen(path, "a")))) {
        va_list list;
        va_start(list, format);
        vfprintf(file, format, list);
        va_end(list);
        fputc('\n', file);
        fflush(file);
    }
    pthread_mutex_unlock(&mutex);
}

static int sticky;

static int enter(const char *name) {
    static int calls;
    char wanted[64];
    int code, nth;
    note("%s", name);
    if (sticky) return sticky;
    const char *fail = getenv("FAKE_CUDA_FAIL");
    if (fail && sscanf(fail, "%63[^:]:%d:%d", wanted, &code, &nth) == 3 && !strcmp(wanted, name) && ++calls == nth) {
        if (code / 100 == 7) sticky = code;
        return code;
    }
    return OK;
}
// A call locks the driver until it returns: launches come from a thread of their own.
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int acquire(void) { return pthread_mutex_lock(&lock); }
static void release(int *held) { (void)held; pthread_mutex_unlock(&lock); }
#define ENTER() \
    __attribute__((cleanup(release))) int held_ = acquire(); \
    do { int code_ = held_ ? held_ : enter(__func__); if (code_) return code_; } while (0)

// ---- memory: device and pinned allocations, inside which copies must lie ----

// `at`: memory file offset; `access`: bits of the devices that may access a mapping.
typedef struct { Address start; size_t bytes; int kind; off_t at; int device; unsigned access; } Piece;
enum { FREE, PLAIN, MAPPED, RESERVED, HANDLE, PINNED };
static Piece pieces[4096];

enum { DEVICES = 16 };
static size_t used[DEVICES];
// A context is the element of its device. `peers`: bits of the devices whose plain memory it may access.
static struct { unsigned peers; int retained; } contexts[DEVICES];
// The device of the current context, from 1, or 0.
static __thread int mine;

static size_t total(void) { return (size_t)number("FAKE_CUDA_MEMORY", 256l << 20); }

static int take(int device, size_t bytes) {
    if (used[device] + bytes > total()) return OUT_OF_MEMORY;
    used[device] += bytes;
    return OK;
}

static Piece *find(Address start, int kind) {
    for (int i = 0; i < 4096; i++)
        if (pieces[i].kind == kind && (kind == FREE || pieces[i].start == start)) return &pieces[i];
    return NULL;
}

static Piece *add(Address start, size_t bytes, int kind, off_t at, int device) {
    Piece *piece = find(0, FREE);
    *piece = (Piece){start, bytes, kind, at, device, 0};
    return piece;
}

static Piece *holding(Address address) {
    for (int i = 0; i < 4096; i++)
        if ((pieces[i].kind == PLAIN || pieces[i].kind == MAPPED) && pieces[i].start <= address && address < pieces[i].start + pieces[i].bytes)
            return &pieces[i];
    return NULL;
}

static int inside(Address start, size_t bytes, int pinned) {
    while (bytes) {
        int i = 0;
        for (; i < 4096; i++) {
            int counts = pinned ? pieces[i].kind == PINNED : pieces[i].kind == PLAIN || pieces[i].kind == MAPPED;
            if (counts && pieces[i].start <= start && start < pieces[i].start + pieces[i].bytes) break;
        }
        if (i == 4096) return 0;
        size_t part = pieces[i].start + pieces[i].bytes - start;
        if (part >= bytes) return 1;
        start += part;
        bytes -= part;
    }
    return 1;
}

// ---- the stream ----

typedef struct { char *dst; const char *src; size_t bytes; uint32_t word; char *own; } Op;
enum { LENGTH = 1 << 12 };
static Op queue[LENGTH];
static size_t head, tail;
typedef struct { int device; } Stream;
typedef struct { size_t at; int device; } Event;

static void run_to(size_t at) {
    for (; head < at; head++) {
        Op *op = &queue[head % LENGTH];
        if (!inside((Address)op->dst, op->bytes, 0) && !inside((Address)op->dst, op->bytes, 1)) {
            if (op->src && !op->own) memcpy(op->dst, op->src, op->bytes); // to pageable host memory
            else sticky = ILLEGAL_ADDRESS;
        } else if (op->src) memcpy(op->dst, op->src, op->bytes);
        else for (size_t i = 0; i < op->bytes / 4; i++) memcpy(op->dst + 4 * i, &op->word, 4);
        free(op->own);
    }
}

static int push(Op op) {
    if (tail - head == LENGTH) run_to(head + 1);
    queue[tail++ % LENGTH] = op;
    return OK;
}

// A graph: the commands of one captured stream.
typedef struct { Op op; void *function; char *line; } Node;
typedef struct { Node nodes[256]; int count; } Graph;
static void *capturing;
static Graph *graph;

static int write_down(Node node) {
    if (graph->count == 256) return INVALID;
    graph->nodes[graph->count++] = node;
    return OK;
}
static int give(void *stream, Op op) { return stream == capturing ? write_down((Node){op, NULL, NULL}) : push(op); }

void fake_cuda_finish(void) {
    pthread_mutex_lock(&lock);
    run_to(tail);
    pthread_mutex_unlock(&lock);
}
void fake_cuda_note(const char *text) { note("%s", text); }

int cuMemcpyHtoDAsync_v2(Address dst, const void *src, size_t bytes, void *stream) {
    ENTER();
    if (!stream || !inside(dst, bytes, 0)) return INVALID;
    if (inside((Address)src, bytes, 1)) return push((Op){(char *)dst, src, bytes, 0, NULL});
    char *own = memcpy(malloc(bytes + 1), src, bytes);
    return push((Op){(char *)dst, own, bytes, 0, own});
}
int cuMemcpyDtoHAsync_v2(void *dst, Address src, size_t bytes, void *stream) {
    ENTER();
    if (!stream || !inside(src, bytes, 0)) return INVALID;
    return push((Op){dst, (char *)src, bytes, 0, NULL});
}
int cuMemcpyAsync(Address dst, Address src, size_t bytes, void *stream) {
    ENTER();
    if (!stream || !(inside(dst, bytes, 0) || inside(dst, bytes, 1))) return INVALID;
    if (!(inside(src, bytes, 0) || inside(src, bytes, 1))) return INVALID;
    return give(stream, (Op){(char *)dst, (char *)src, bytes, 0, NULL});
}
int cuMemsetD32Async(Address dst, unsigned word, size_t words, void *stream) {
    ENTER();
    if (!stream || dst % 4 || !inside(dst, words * 4, 0)) return INVALID;
    return give(stream, (Op){(char *)dst, NULL, words * 4, word, NULL});
}
// The copy is direct if the source's device may access all memory that it writes.
int cuMemcpyPeerAsync(Address dst, void *dst_context, Address src, void *src_context, size_t bytes, void *stream) {
    ENTER();
    int to = (int)((char *)dst_context - (char *)contexts) / (int)sizeof *contexts;
    int from = (int)((char *)src_context - (char *)contexts) / (int)sizeof *contexts;
    if (!stream || ((Stream *)stream)->device != from || !inside(dst, bytes, 0) || !inside(src, bytes, 0)) return INVALID;
    int direct = 1;
    for (Address at = dst; at < dst + bytes; at = holding(at)->start + holding(at)->bytes) {
        Piece *piece = holding(at);
        if (piece->device != to) return INVALID;
        direct &= (piece->kind == PLAIN ? contexts[from].peers >> to : piece->access >> from) & 1;
    }
    for (Address at = src; at < src + bytes; at = holding(at)->start + holding(at)->bytes)
        if (holding(at)->device != from) return INVALID;
    note("%s copy from %d to %d", direct ? "direct" : "staged", from, to);
    return give(stream, (Op){(char *)dst, (char *)src, bytes, 0, NULL});
}
int cuStreamCreate(void **stream, unsigned flags) {
    ENTER();
    *stream = calloc(1, sizeof(Stream));
    ((Stream *)*stream)->device = mine - 1;
    return flags == 1 && mine ? OK : INVALID;
}
int cuStreamSynchronize(void *stream) {
    ENTER();
    run_to(tail);
    return stream ? sticky : INVALID;
}
int cuStreamDestroy_v2(void *stream) { ENTER(); free(stream); return OK; }
// All streams are one, so waits between streams do nothing.
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    ENTER();
    if (!stream || !event || flags) return INVALID;
    int waits = ((Stream *)stream)->device, other = ((Event *)event)->device;
    if (waits != other) note("device %d waits for device %d", waits, other);
    return OK;
}
// The device has no TMA.
int cuTensorMapEncodeTiled(void) { ENTER(); return INVALID; }
int cuEventCreate(void **event, unsigned flags) {
    ENTER();
    *event = calloc(1, sizeof(Event));
    ((Event *)*event)->device = mine - 1;
    return flags == 2 || flags == 0 ? OK : INVALID;
}
int cuEventElapsedTime(float *ms, void *start, void *end) {
    ENTER();
    *ms = (float)((double)((Event *)end)->at - (double)((Event *)start)->at);
    return OK;
}
int cuEventDestroy_v2(void *event) { ENTER(); free(event); return OK; }
int cuEventRecord(void *event, void *stream) {
    ENTER();
    ((Event *)event)->at = tail;
    return stream && ((Event *)event)->device == ((Stream *)stream)->device ? OK : INVALID;
}
int cuEventQuery(void *event) {
    ENTER();
    size_t at = ((Event *)event)->at;
    if (head < at) run_to(head + 1);
    return sticky ? sticky : head < at ? NOT_READY : OK;
}
int cuEventSynchronize(void *event) {
    ENTER();
    run_to(((Event *)event)->at);
    return sticky;
}

// ---- device, context ----

int cuInit(unsigned flags) { (void)flags; ENTER(); return number("FAKE_CUDA_DEVICES", 1) ? OK : NO_DEVICE; }
int cuDriverGetVersion(int *version) { ENTER(); *version = (int)number("FAKE_CUDA_VERSION", 13000); return OK; }
int cuDeviceGetCount(int *count) { ENTER(); *count = (int)number("FAKE_CUDA_DEVICES", 1); return OK; }
int cuDeviceGet(int *device, int ordinal) { ENTER(); *device = ordinal; return OK; }
int cuDeviceGetName(char *name, int length, int device) {
    ENTER();
    snprintf(name, (size_t)length, "Fake GPU %d", device);
    return OK;
}
int cuDeviceGetPCIBusId(char *address, int length, int device) {
    ENTER();
    snprintf(address, (size_t)length, "0000:%02x:00.0", 0x3b + device);
    return OK;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; ENTER(); *bytes = total(); return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    ENTER();
    switch (attribute) {
    case 1: *value = 1024; return OK;                              // threads per block
    case 97: *value = 232448; return OK; // opt-in shared memory per block
    case 10: *value = 32; return OK;                               // warp
    case 16: *value = 132; return OK;                              // multiprocessors
    case 75: *value = 9; return OK;                                // compute capability
    case 76: *value = 0; return OK;
    case 102: *value = (int)number("FAKE_CUDA_VMM", 1); return OK; // virtual memory
    default: return INVALID;
    }
}
int cuDeviceCanAccessPeer(int *can, int device, int other) {
    ENTER();
    *can = device != other && number("FAKE_CUDA_LINK", 1);
    return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER();
    contexts[device].retained++;
    *context = &contexts[device];
    return OK;
}
// With its last handle, a context loses its rights to the memory of other devices.
int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER();
    if (--contexts[device].retained) return OK;
    contexts[device].peers = 0;
    for (int i = 0; i < 4096; i++)
        if (pieces[i].kind == MAPPED && pieces[i].device != device) pieces[i].access &= ~(1u << device);
    return OK;
}
int cuCtxSetCurrent(void *context) {
    ENTER();
    mine = 1 + (int)((char *)context - (char *)contexts) / (int)sizeof *contexts;
    return mine > 0 && mine <= DEVICES ? OK : INVALID;
}
int cuCtxEnablePeerAccess(void *context, unsigned flags) {
    ENTER();
    int device = (int)((char *)context - (char *)contexts) / (int)sizeof *contexts;
    if (!mine || flags || device == mine - 1) return INVALID;
    if (contexts[mine - 1].peers >> device & 1) return PEER_ACCESS_ALREADY_ENABLED;
    contexts[mine - 1].peers |= 1u << device;
    return OK;
}
int cuCtxSynchronize(void) { ENTER(); run_to(tail); return mine ? sticky : INVALID; }

int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 999 ? "CUDA_ERROR_UNKNOWN" : NULL;
    return *name ? OK : INVALID;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == 2 ? "out of memory" : code == 700 ? "an illegal memory access was encountered" : NULL;
    return *text ? OK : INVALID;
}

// ---- allocation ----

int cuMemGetInfo_v2(size_t *free_, size_t *total_) {
    ENTER();
    if (!mine) return INVALID;
    *total_ = total();
    *free_ = total() - used[mine - 1];
    return OK;
}
int cuMemAlloc_v2(Address *address, size_t bytes) {
    ENTER();
    if (!mine || !bytes) return INVALID;
    if (take(mine - 1, bytes)) return OUT_OF_MEMORY;
    *address = (Address)aligned_alloc(512, (bytes + 511) / 512 * 512);
    add(*address, bytes, PLAIN, 0, mine - 1);
    return OK;
}
int cuMemFree_v2(Address address) {
    ENTER();
    run_to(tail);
    Piece *piece = find(address, PLAIN);
    if (!piece) return INVALID;
    used[piece->device] -= piece->bytes;
    piece->kind = FREE;
    free((void *)address);
    return OK;
}
int cuMemHostAlloc(void **start, size_t bytes, unsigned flags) {
    (void)flags;
    ENTER();
    *start = aligned_alloc(4096, bytes);
    add((Address)*start, bytes, PINNED, 0, 0);
    return OK;
}
int cuMemFreeHost(void *start) {
    ENTER();
    run_to(tail);
    Piece *piece = find((Address)start, PINNED);
    if (!piece) return INVALID;
    piece->kind = FREE;
    free(start);
    return OK;
}

// ---- virtual memory ----

enum { PAGE = 2 << 20 };
int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    (void)properties, (void)option;
    ENTER();
    *bytes = PAGE;
    return OK;
}
int cuMemAddressReserve(Address *start, size_t bytes, size_t alignment, Address wanted, unsigned long long flags) {
    (void)alignment, (void)wanted, (void)flags;
    ENTER();
    if (bytes % PAGE) return INVALID;
    void *range = mmap(NULL, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return OUT_OF_MEMORY;
    *start = ((Address)range + PAGE - 1) / PAGE * PAGE;
    add(*start, bytes, RESERVED, 0, 0);
    return OK;
}
int cuMemAddressFree(Address start, size_t bytes) {
    ENTER();
    Piece *piece = find(start, RESERVED);
    if (!piece || piece->bytes != bytes) return INVALID;
    for (int i = 0; i < 4096; i++)
        if (pieces[i].kind == MAPPED && pieces[i].start >= start && pieces[i].start < start + bytes) return INVALID;
    piece->kind = FREE;
    munmap((void *)start, bytes);
    return OK;
}
// The memory of handles and mappings is in a file, each at its own offset, and is freed with the last of
// them.
static int memory_file(void) {
    static int file;
    if (!file) file = memfd_create("device", 0);
    return file;
}
static void drop(Piece *piece) {
    piece->kind = FREE;
    for (int i = 0; i < 4096; i++)
        if ((pieces[i].kind == HANDLE || pieces[i].kind == MAPPED) && pieces[i].at == piece->at) return;
    fallocate(memory_file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, piece->at, (off_t)piece->bytes);
}
// Releasing a handle frees its memory, unless the memory is mapped: then the mapping owns the memory.
int cuMemCreate(Address *handle, size_t bytes, const void *properties, unsigned long long flags) {
    static Address last = 0x1000;
    static off_t end;
    (void)flags;
    ENTER();
    int device = ((const int *)properties)[3]; // after type, handle types and the location's type
    if (!bytes || bytes % PAGE || device < 0 || device >= DEVICES) return INVALID;
    if (take(device, bytes)) return OUT_OF_MEMORY;
    if (ftruncate(memory_file(), end + (off_t)bytes)) return INVALID;
    add(*handle = ++last, bytes, HANDLE, end, device);
    end += (off_t)bytes;
    return OK;
}
int cuMemMap(Address start, size_t bytes, size_t offset, Address handle, unsigned long long flags) {
    (void)offset, (void)flags;
    ENTER();
    Piece *memory = find(handle, HANDLE);
    if (!memory || memory->bytes != bytes || start % PAGE) return INVALID;
    for (int i = 0; i < 4096; i++) {
        if (pieces[i].kind == MAPPED && pieces[i].start < start + bytes && start < pieces[i].start + pieces[i].bytes) return INVALID;
    }
    used[memory->device] += bytes; // Bytes of the mapping; the handle's are subtracted at its release.
    mmap((void *)start, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory_file(), memory->at);
    add(start, bytes, MAPPED, memory->at, memory->device);
    return OK;
}
int cuMemRetainAllocationHandle(Address *handle, void *start) {
    static Address last = 0x8000000;
    ENTER();
    Piece *piece = find((Address)start, MAPPED);
    if (!piece) return INVALID;
    used[piece->device] += piece->bytes; // Until its release; the memory is the same.
    add(*handle = ++last, piece->bytes, HANDLE, piece->at, piece->device);
    return OK;
}
int cuMemRelease(Address handle) {
    ENTER();
    Piece *memory = find(handle, HANDLE);
    if (!memory) return INVALID;
    used[memory->device] -= memory->bytes;
    drop(memory);
    return OK;
}
typedef struct { int type, device, flags; } Access;
int cuMemSetAccess(Address start, size_t bytes, const Access *access, size_t count) {
    ENTER();
    // One mapping, or several consecutive ones.
    for (Address at = start; at < start + bytes;) {
        Piece *piece = find(at, MAPPED);
        if (!piece || !count) return INVALID;
        for (size_t i = 0; i < count; i++) {
            if (access[i].device != piece->device && !number("FAKE_CUDA_LINK", 1)) return INVALID;
            piece->access |= 1u << access[i].device;
        }
        at += piece->bytes;
        if (at > start + bytes) return INVALID;
    }
    return mprotect((void *)start, bytes, PROT_READ | PROT_WRITE) ? INVALID : OK;
}
int cuMemUnmap(Address start, size_t bytes) {
    ENTER();
    Piece *piece = find(start, MAPPED);
    if (!piece || piece->bytes != bytes) return INVALID;
    used[piece->device] -= bytes;
    drop(piece);
    mmap((void *)start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return OK;
}

// ---- kernels: a module is its text, a function its name ----

int cuModuleLoadData(void **module, const void *image) {
    ENTER();
    if (strncmp(image, "fake cubin", 10)) return INVALID_IMAGE;
    *module = strdup(image);
    return OK;
}
int cuModuleUnload(void *module) { ENTER(); free(module); return OK; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    ENTER();
    if (!strstr(module, name)) return NOT_FOUND;
    *function = strstr(module, name);
    return OK;
}
int cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) { ENTER(); if (!clusters || !function || !config) return INVALID; *clusters = 1; return OK; }
int cuFuncSetAttribute(void *function, int attribute, int value) { ENTER(); return function && attribute && value > 0 ? OK : INVALID; }
static char *line_of(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, void **arguments) {
    static char line[4096];
    int at = snprintf(line, sizeof line, "launch %u,%u,%u of %u,%u,%u:", gx, gy, gz, bx, by, bz);
    const char *sizes = getenv("FAKE_CUDA_PARAMS");
    for (int i = 0; sizes && *sizes; i++, sizes += strcspn(sizes, ","), sizes += *sizes == ',') {
        at += snprintf(line + at, sizeof line - (size_t)at, " ");
        for (int j = 0; j < atoi(sizes); j++)
            at += snprintf(line + at, sizeof line - (size_t)at, "%02x", ((unsigned char *)arguments[i])[j]);
    }
    return line;
}
typedef struct { unsigned gx, gy, gz, bx, by, bz, shared; void *stream; const void *attributes; unsigned count; } Launch;
int cuLaunchKernelEx(const Launch *launch, void *function, void **arguments, void **extra) {
    ENTER();
    // A graph's kernels run one after the other.
    if (!mine || !function || !launch->stream || launch->shared || extra || launch->count > (launch->stream != capturing)) return INVALID;
    if (number("FAKE_CUDA_LAUNCH_US", 0)) usleep((useconds_t)number("FAKE_CUDA_LAUNCH_US", 0));
    note(launch->count ? "programmatic start" : "serialised start");
    char *line = line_of(launch->gx, launch->gy, launch->gz, launch->bx, launch->by, launch->bz, arguments);
    if (launch->stream == capturing) return write_down((Node){{0}, function, strdup(line)});
    note("%s", line);
    return OK;
}

// ---- graphs: the captured graph is also the executable one ----

typedef struct {
    void *function;
    unsigned gx, gy, gz, bx, by, bz, shared;
    void **arguments, **extra;
    void *kernel, *context;
} NodeParams;

int cuStreamBeginCapture_v2(void *stream, int mode) {
    ENTER();
    if (!stream || capturing || mode != 2) return INVALID;
    capturing = stream;
    graph = calloc(1, sizeof *graph);
    return OK;
}
int cuStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *id, void **found, void ***last, size_t *count) {
    static void *node;
    ENTER();
    if (stream != capturing) return INVALID;
    node = graph->count ? &graph->nodes[graph->count - 1] : NULL;
    *status = 1, *id = 1, *found = graph, *last = &node, *count = node != NULL;
    return OK;
}
int cuStreamEndCapture(void *stream, void **made) {
    ENTER();
    if (stream != capturing) return INVALID;
    *made = graph;
    capturing = NULL;
    return OK;
}
int cuGraphInstantiateWithFlags(void **ready, void *made, unsigned long long flags) {
    ENTER();
    *ready = made;
    return made && !flags ? OK : INVALID;
}
int cuGraphExecKernelNodeSetParams_v2(void *ready, void *at, const NodeParams *params) {
    ENTER();
    Graph *all = ready;
    Node *node = at;
    if (node < all->nodes || node >= all->nodes + all->count || !node->function) return INVALID;
    if (!params->function || params->shared || params->extra || params->kernel) return INVALID;
    node->function = params->function;
    free(node->line);
    node->line = strdup(line_of(params->gx, params->gy, params->gz, params->bx, params->by, params->bz, params->arguments));
    return OK;
}
int cuGraphLaunch(void *ready, void *stream) {
    ENTER();
    if (!ready || !stream || stream == capturing) return INVALID;
    Graph *all = ready;
    for (int i = 0; i < all->count; i++) {
        if (all->nodes[i].line) note("%s", all->nodes[i].line);
        else push(all->nodes[i].op);
    }
    return OK;
}
int cuGraphExecDestroy(void *ready) { ENTER(); return ready ? OK : INVALID; }
int cuGraphDestroy(void *made) {
    ENTER();
    Graph *all = made;
    for (int i = 0; i < all->count; i++) free(all->nodes[i].line);
    free(all);
    return OK;
}
