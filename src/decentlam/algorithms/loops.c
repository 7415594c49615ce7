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
#if !defined(__clang__) && __GNUC__ >= 11 /* others do not know how to ask for f16c */
#include <immintrin.h>
#define CONVERTS_FLOAT16 __attribute__((target("avx,f16c")))
#endif
#endif
#endif
#ifndef VECTORIZED
#define VECTORIZED
#endif

enum { WHOLE, BFLOAT16, FLOAT16 }; /* what a term has: REAL, or 16 bits */

typedef struct {
    size_t count;
    const void *const *terms;
    const double *weights;
    const int *kinds;
} Mix;

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The exponent of a float32 is larger by 112, that of infinity by 224. What is below the least
   normal float16 is found as a difference of normal float32, which survives where denormals are
   flushed. */
static inline float of_float16(uint16_t half) {
    const uint32_t exponent = 1u << 23, shift = 112 * exponent, rest = (half & 0x7fffu) << 13;
    const float sign = half & 0x8000 ? -1 : 1;
    if (rest < exponent)
        return sign * 2 * (of_bits(rest + shift) - of_bits(shift));
    return sign * of_bits(rest + shift + (rest < 31 * exponent ? 0 : shift));
}

#ifdef CONVERTS_FLOAT16
CONVERTS_FLOAT16 static size_t eight_at_a_time(float *out, const uint16_t *halves, size_t size) {
    size_t i = 0;
    for (; i + 8 <= size; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
    return i;
}
#endif

/* out = what the 16 bits of each element stand for */
static inline void widen(float *restrict out, const uint16_t *restrict halves, size_t size,
                         int kind) {
    size_t i = 0;
    if (kind == BFLOAT16) {
        for (; i < size; i++)
            out[i] = of_bits((uint32_t)halves[i] << 16);
        return;
    }
#ifdef CONVERTS_FLOAT16
    if (__builtin_cpu_supports("f16c"))
        i = eight_at_a_time(out, halves, size);
#endif
    for (; i < size; i++)
        out[i] = of_float16(halves[i]);
}

#define REAL float
#define NAMED(loop) loop##_float32
#include "loops.h"
#undef REAL
#undef NAMED

#define REAL double
#define NAMED(loop) loop##_float64
#include "loops.h"
