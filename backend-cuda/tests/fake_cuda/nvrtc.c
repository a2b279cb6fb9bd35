// Test double of NVRTC that returns the source as the code. With FAKE_NVRTC_WAITS=1, compilation waits for a
// file, or ten seconds at most. The file's path is FAKE_CUDA_LOG with ".go" at its end.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void fake_cuda_note(const char *text);

typedef struct { char *code; } Program;
enum { OK = 0, COMPILATION = 6 };

int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return OK; }
int nvrtcCreateProgram(Program **program, const char *source, const char *name, int count, const char *const *headers, const char *const *names) {
    (void)name, (void)count, (void)headers, (void)names;
    *program = malloc(sizeof(Program));
    (*program)->code = malloc(strlen(source) + 16);
    strcat(strcpy((*program)->code, "fake cubin\n"), source);
    return OK;
}
static void wait_for_the_file(void) {
    char path[4096];
    if (!getenv("FAKE_NVRTC_WAITS") || !getenv("FAKE_CUDA_LOG")) return;
    snprintf(path, sizeof path, "%s.go", getenv("FAKE_CUDA_LOG"));
    for (int i = 0; i < 10000 && access(path, F_OK); i++) usleep(1000);
}
int nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    wait_for_the_file();
    fake_cuda_note("nvrtcCompileProgram");
    for (int i = 0; i < count; i++) fake_cuda_note(options[i]);
    return strstr(program->code, "fail_to_compile") ? COMPILATION : OK;
}
int nvrtcGetCUBINSize(Program *program, size_t *bytes) { *bytes = strlen(program->code) + 1; return OK; }
int nvrtcGetCUBIN(Program *program, char *code) { strcpy(code, program->code); return OK; }
int nvrtcGetProgramLogSize(Program *program, size_t *bytes) { (void)program; *bytes = 12; return OK; }
int nvrtcGetProgramLog(Program *program, char *log) { (void)program; strcpy(log, "it is wrong"); return OK; }
const char *nvrtcGetErrorString(int code) { return code ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS"; }
int nvrtcDestroyProgram(Program **program) {
    free((*program)->code);
    free(*program);
    *program = NULL;
    return OK;
}
