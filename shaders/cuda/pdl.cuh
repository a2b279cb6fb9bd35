// From sm_90 on, a kernel may be started while the previous one ends (programmatic dependent launch): each
// kernel waits here before it accesses memory.
#if __CUDA_ARCH__ >= 900
#define PDL_WAIT() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define PDL_WAIT()
#endif
