/* What DecentLaM computes in a step, each call one pass over memory. compiled.py calls these; the
   recursions stand in decentlam.py and steady.py.

   Every element is computed alone and without fused multiply-adds, so the numbers are the same on
   every processor, however the memory is cut. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "these flags would let NaN pass, and numbers differ"
#endif

const char *const digest = DIGEST; /* of the sources, by which compiled.py knows its library */

#define BLOCK 1024 /* elements of a mix that stay in the first cache until they are used */

/* The library chooses at start what the processor has: it can be built on another machine. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif
#ifndef VECTORIZED
#define VECTORIZED
#endif

typedef struct {
    size_t count;
    const void *const *terms;
    const double *weights;
    const int *bfloat16; /* whether a term has 16 bits */
} Mix;

static inline float widened(uint16_t bfloat16) {
    const uint32_t bits = (uint32_t)bfloat16 << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define REAL float
#define NAMED(loop) loop##_float32
#include "loops.h"
#undef REAL
#undef NAMED

#define REAL double
#define NAMED(loop) loop##_float64
#include "loops.h"
