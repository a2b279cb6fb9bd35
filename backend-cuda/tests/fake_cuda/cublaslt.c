// Test double of cuBLASLt on the CPU: column-major matrix products of f32 and f64.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void fake_cuda_finish(void);
void fake_cuda_note(const char *text);

typedef struct { int type; uint64_t rows, cols; int64_t ld; int batch; int64_t stride; } Layout;
typedef struct { int compute, scale, transposed[2]; } Desc;
typedef struct { uint64_t workspace; uint32_t alignment[4]; } Preference;
typedef struct { uint64_t data[8]; size_t workspace; int state; float waves; int reserved[4]; } Heuristic;
enum { OK = 0, INVALID = 7, NOT_SUPPORTED = 15 };

size_t cublasLtGetVersion(void) { return 130001; }
int cublasLtCreate(void **handle) { *handle = malloc(1); return OK; }
int cublasLtDestroy(void *handle) { free(handle); return OK; }

int cublasLtMatrixLayoutCreate(Layout **layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    *layout = malloc(sizeof(Layout));
    **layout = (Layout){type, rows, cols, ld, 1, 0};
    return ld >= (int64_t)rows ? OK : INVALID;
}
int cublasLtMatrixLayoutDestroy(Layout *layout) { free(layout); return OK; }
int cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value, size_t bytes) {
    if (attribute == 5 && bytes == 4) memcpy(&layout->batch, value, 4);
    else if (attribute == 6 && bytes == 8) memcpy(&layout->stride, value, 8);
    else return INVALID;
    return OK;
}

int cublasLtMatmulDescCreate(Desc **desc, int compute, int scale) {
    *desc = malloc(sizeof(Desc));
    **desc = (Desc){compute, scale, {0, 0}};
    return OK;
}
int cublasLtMatmulDescDestroy(Desc *desc) { free(desc); return OK; }
int cublasLtMatmulDescSetAttribute(Desc *desc, int attribute, const void *value, size_t bytes) {
    if ((attribute != 3 && attribute != 4) || bytes != 4) return INVALID;
    memcpy(&desc->transposed[attribute - 3], value, 4);
    return OK;
}

int cublasLtMatmulPreferenceCreate(Preference **preference) { *preference = calloc(1, sizeof(Preference)); return OK; }
int cublasLtMatmulPreferenceDestroy(Preference *preference) { free(preference); return OK; }
int cublasLtMatmulPreferenceSetAttribute(Preference *preference, int attribute, const void *value, size_t bytes) {
    if (attribute == 1 && bytes == 8) memcpy(&preference->workspace, value, 8);
    else if (attribute >= 5 && attribute <= 8 && bytes == 4) memcpy(&preference->alignment[attribute - 5], value, 4);
    else return attribute == 3 && bytes == 4 ? OK : INVALID;
    return OK;
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, Desc *desc, Layout *a, Layout *b, Layout *c, Layout *d,
                                   Preference *preference, int wanted, Heuristic *results, int *found) {
    (void)handle, (void)d, (void)wanted;
    fake_cuda_note("heuristic");
    uint64_t inner[2] = {desc->transposed[0] ? a->rows : a->cols, desc->transposed[1] ? b->cols : b->rows};
    int fits = inner[0] == inner[1] && a->type == c->type && b->type == c->type && preference->alignment[3] > 0;
    *found = fits && (c->type == 0 || c->type == 1);
    memset(results, 0, sizeof *results);
    return *found ? OK : NOT_SUPPORTED;
}

static double load(const void *from, int type, int64_t at) {
    return type == 1 ? ((const double *)from)[at] : ((const float *)from)[at];
}
int cublasLtMatmul(void *handle, Desc *desc, const void *alpha, const void *A, Layout *a, const void *B, Layout *b,
                   const void *beta, const void *C, Layout *c, void *D, Layout *d, const void *algorithm,
                   void *workspace, size_t bytes, void *stream) {
    if (!handle || !algorithm || !stream || (bytes && !workspace) || C != D) return INVALID;
    fake_cuda_note("cublasLtMatmul");
    fake_cuda_finish();
    uint64_t inner = desc->transposed[0] ? a->rows : a->cols;
    for (int batch = 0; batch < c->batch; batch++)
        for (uint64_t col = 0; col < d->cols; col++)
            for (uint64_t row = 0; row < d->rows; row++) {
                double sum = 0;
                for (uint64_t i = 0; i < inner; i++) {
                    int64_t at_a = (int64_t)(desc->transposed[0] ? i + row * a->ld : row + i * a->ld);
                    int64_t at_b = (int64_t)(desc->transposed[1] ? col + i * b->ld : i + col * b->ld);
                    sum += load(A, a->type, at_a + batch * a->stride) * load(B, b->type, at_b + batch * b->stride);
                }
                int64_t at = (int64_t)(row + col * d->ld) + batch * d->stride;
                sum = sum * load(alpha, desc->scale, 0) + load(beta, desc->scale, 0) * load(C, c->type, at);
                if (d->type == 1) ((double *)D)[at] = sum;
                else ((float *)D)[at] = (float)sum;
            }
    return OK;
}
