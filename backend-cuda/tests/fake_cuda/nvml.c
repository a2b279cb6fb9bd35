// Test double of NVML: calls are logged, and one device has three processes.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7 };

typedef struct {
    unsigned pid;
    unsigned long long bytes;
    unsigned instance, part;
} Process;

static void entered(const char *name) {
    const char *log = getenv("FAKE_CUDA_LOG");
    FILE *file = log ? fopen(log, "a") : NULL;
    if (file) {
        fprintf(file, "%s\n", name);
        fclose(file);
    }
}
#define ENTER() entered(__func__)

int nvmlInit_v2(void) { ENTER(); return getenv("FAKE_NVML_DENIED") ? NO_PERMISSION : OK; }
int nvmlShutdown(void) { ENTER(); return OK; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) {
    ENTER();
    *device = (void *)1;
    return strcmp(address, "0000:3b:00.0") ? NOT_FOUND : OK;
}
static int list(const Process *all, unsigned known, unsigned *count, Process *out) {
    unsigned room = *count;
    *count = known;
    if (room < known) return TOO_SMALL;
    memcpy(out, all, known * sizeof *all);
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *out) {
    (void)device;
    ENTER();
    // In a container, this process has another id outside.
    unsigned self = getenv("FAKE_NVML_CONTAINER") ? 1000000 : (unsigned)getpid();
    Process all[] = {{self, 5 << 20, ~0u, ~0u}, {4242, 60 << 20, ~0u, ~0u}};
    return list(all, 2, count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, Process *out) {
    (void)device;
    ENTER();
    Process all[] = {{4242, 60 << 20, ~0u, ~0u}, {99, ~0ull, ~0u, ~0u}};
    return list(all, 2, count, out);
}
int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    ENTER();
    if (pid == 99) return NO_PERMISSION;
    snprintf(name, length, "/usr/bin/python3");
    return OK;
}
