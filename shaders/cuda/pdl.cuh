// From sm_90 on a kernel may be started while the one in front of it ends (programmatic dependent launch): each waits for that here, before it
// touches memory.
#if __CUDA_ARCH__ >= 900
#define FOLLOW() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define FOLLOW()
#endif
