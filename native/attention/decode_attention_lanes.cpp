// The float32 paths of decode attention: one body, compiled for each kind of processor.
//
// The target options surround the body instead of marking each function. GCC splits generic vectors
// into those that the enclosing function supports before it inlines.
#include <cstddef>
#include <cstdint>

#include "attention/decode_attention_paths.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__aarch64__)  // every one of them fuses
#define MOEINF_LANE_FUSED(a, b, c) \
    vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b))
#endif

#define MOEINF_LANES portable
#define MOEINF_LANE_FLOATS 4
#include "attention/decode_attention_lanes.h"
#undef MOEINF_LANES
#undef MOEINF_LANE_FLOATS

#if defined(__x86_64__)

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define MOEINF_LANES avx2
#define MOEINF_LANE_FLOATS 8
#define MOEINF_LANE_FUSED(a, b, c) _mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c))
#include "attention/decode_attention_lanes.h"
#undef MOEINF_LANES
#undef MOEINF_LANE_FLOATS
#undef MOEINF_LANE_FUSED
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define MOEINF_LANES avx512
#define MOEINF_LANE_FLOATS 16
#define MOEINF_LANE_FUSED(a, b, c) _mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c))
#include "attention/decode_attention_lanes.h"
#undef MOEINF_LANES
#undef MOEINF_LANE_FLOATS
#undef MOEINF_LANE_FUSED
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#elif defined(__aarch64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define MOEINF_LANES neon
#define MOEINF_LANE_FLOATS 4
#define MOEINF_LANE_SDOT
#include "attention/decode_attention_lanes.h"
#undef MOEINF_LANES
#undef MOEINF_LANE_FLOATS
#undef MOEINF_LANE_FUSED
#undef MOEINF_LANE_SDOT
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

namespace moeinf::attention {

const Path kPortablePath{portable::packed_bytes, portable::pack, portable::run};
const Path kPortableQ8Path{portable::packed_bytes, portable::pack, portable::run_q8};
#if defined(__x86_64__)
const Path kAvx2Path{avx2::packed_bytes, avx2::pack, avx2::run};
const Path kAvx512Path{avx512::packed_bytes, avx512::pack, avx512::run};
const Path kAvx2Q8Path{avx2::packed_q8_bytes, avx2::pack_q8, avx2::run_q8};
#elif defined(__aarch64__)
const Path kNeonPath{neon::packed_bytes, neon::pack, neon::run};
const Path kNeonQ8Path{neon::packed_q8_bytes, neon::pack_q8, neon::run_q8};
#endif

#define MOEINF_ROW_MATH(lanes) \
    {lanes::sum_rows, lanes::dot_rows, lanes::norm, lanes::wide_norm, lanes::rotate_half}

const RowMath& row_math() noexcept {
    static constexpr RowMath kPortable = MOEINF_ROW_MATH(portable);
#if defined(__x86_64__)
    static constexpr RowMath kAvx2 = MOEINF_ROW_MATH(avx2);
    static constexpr RowMath kAvx512 = MOEINF_ROW_MATH(avx512);
    if (best_attention_path() >= AttentionPath::kAvx512) return kAvx512;
    if (best_attention_path() == AttentionPath::kAvx2) return kAvx2;
#elif defined(__aarch64__)
    static constexpr RowMath kNeon = MOEINF_ROW_MATH(neon);
    if (best_attention_path() == AttentionPath::kNeon) return kNeon;
#endif
    return kPortable;
}

#undef MOEINF_ROW_MATH

}  // namespace moeinf::attention
