// Test double of an NVTX tool: fills in functions of the core module, and logs each call.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void (*Function)(void);
typedef struct {
    size_t size;
    int (*table)(int module, Function ***table, unsigned *size);
} Callbacks;
typedef struct {
    size_t size;
    uint32_t version, reserved;
    void (*set)(uint32_t);
} VersionInfo;

static int depth;

static void line(const char *text, const char *name) {
    FILE *log = fopen(getenv("FAKE_CUDA_LOG"), "a");
    fprintf(log, "%s%s\n", text, name);
    fclose(log);
}

static int push(const char *name) {
    line("+", name);
    return depth++;
}

static int pop(void) {
    line("-", "");
    return --depth;
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const Callbacks *callbacks = export_table(1);
    const VersionInfo *version = export_table(3);
    Function **table = 0;
    unsigned size = 0;
    if (export_table(2) || callbacks->size != sizeof *callbacks || version->size != sizeof *version) return 0;
    version->set(version->version);
    // Like real tools, requests the table of every module and writes to it; only unknown modules are refused.
    static const unsigned sizes[] = {0, 16, 9, 15, 7, 16, 7};
    for (int module = 1; module < 7; module++) {
        if (!callbacks->table(module, &table, &size) || size != sizes[module] || table[0] || table[size]) return 0;
        for (unsigned i = 1; i < size; i++) *table[i] = 0;
    }
    if (callbacks->table(0, &table, &size) || callbacks->table(7, &table, &size)) return 0;
    callbacks->table(1, &table, &size);
    if (!getenv("FAKE_NVTX_DEAF")) *table[9] = (Function)push;
    *table[11] = (Function)pop;
    return getenv("FAKE_NVTX_FAIL") == 0;
}
