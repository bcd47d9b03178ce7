// The row operations around decode attention (RowMath), in vectors of kFloats floats.
// decode_attention_lanes.h includes this once for each kind of processor.

constexpr std::size_t kRowsAtOnce = 8;
constexpr std::size_t kColumnsAtOnce = 1024;  // sums that fit in the nearest cache

template <std::size_t Rows>
inline void add_rows(const std::uint16_t* weights, std::size_t width, std::size_t columns,
                     const std::uint16_t* x, float* sums) noexcept {
    std::size_t column = 0;
    for (; column + kFloats <= columns; column += kFloats) {
        Vector sum = load(sums + column);
        for (std::size_t row = 0; row < Rows; ++row)
            sum = fused(widen(x[row]), load(weights + row * width + column), sum);
        store(sums + column, sum);
    }
    for (; column < columns; ++column)
        for (std::size_t row = 0; row < Rows; ++row)
            sums[column] =
                fused(widen(x[row]), widen(weights[row * width + column]), sums[column]);
}

void sum_rows(const std::uint16_t* weights, std::size_t rows, std::size_t width,
              const std::uint16_t* x, std::uint16_t* out) noexcept {
    for (std::size_t first = 0; first < width; first += kColumnsAtOnce) {
        const std::size_t left = width - first;
        const std::size_t columns = left < kColumnsAtOnce ? left : kColumnsAtOnce;
        float sums[kColumnsAtOnce];
        for (std::size_t column = 0; column < columns; ++column) sums[column] = 0;
        const std::uint16_t* from = weights + first;
        std::size_t row = 0;
        for (; row + kRowsAtOnce <= rows; row += kRowsAtOnce)
            add_rows<kRowsAtOnce>(from + row * width, width, columns, x + row, sums);
        for (; row < rows; ++row) add_rows<1>(from + row * width, width, columns, x + row, sums);
        for (std::size_t column = 0; column < columns; ++column)
            out[first + column] = narrow(sums[column]);
    }
}

void dot_rows(const std::uint16_t* weights, std::size_t rows, std::size_t width,
              const std::uint16_t* x, std::uint16_t* out) noexcept {
    for (std::size_t row = 0; row < rows; ++row) {
        const std::uint16_t* at = weights + row * width;
        Vector sums[4] = {};
        std::size_t column = 0;
        for (; column + 4 * kFloats <= width; column += 4 * kFloats)
            for (std::size_t i = 0; i < 4; ++i)
                sums[i] =
                    fused(load(at + column + i * kFloats), load(x + column + i * kFloats), sums[i]);
        float sum = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
        for (; column < width; ++column) sum = fused(widen(at[column]), widen(x[column]), sum);
        out[row] = narrow(sum);
    }
}

// Returns 1 / sqrt(mean(x²) + eps).
inline float norm_factor(std::size_t width, float eps, const std::uint16_t* x) noexcept {
    Vector sums[2] = {};
    std::size_t i = 0;
    for (; i + 2 * kFloats <= width; i += 2 * kFloats)
        for (std::size_t k = 0; k < 2; ++k) {
            const Vector value = load(x + i + k * kFloats);
            sums[k] = fused(value, value, sums[k]);
        }
    float sum = sum_of(sums[0] + sums[1]);
    for (; i < width; ++i) sum = fused(widen(x[i]), widen(x[i]), sum);
    return 1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + eps);
}

void norm(const std::uint16_t* weight, std::size_t width, float eps, const std::uint16_t* x,
          std::uint16_t* out) noexcept {
    const float factor = norm_factor(width, eps, x);
    std::size_t i = 0;
    for (; i + kFloats <= width; i += kFloats)
        store(out + i, round_to_half(load(x + i) * factor) * load(weight + i));
    for (; i < width; ++i) out[i] = narrow(widen(narrow(widen(x[i]) * factor)) * widen(weight[i]));
}

void wide_norm(const float* weight, std::size_t width, float eps, const std::uint16_t* x,
               std::uint16_t* out) noexcept {
    const float factor = norm_factor(width, eps, x);
    std::size_t i = 0;
    for (; i + kFloats <= width; i += kFloats)
        store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < width; ++i) out[i] = narrow(widen(x[i]) * factor * weight[i]);
}

void rotate_half(const std::uint16_t* x, const float* cos, const float* sin, std::size_t width,
                 std::uint16_t* out) noexcept {
    const std::size_t half = width / 2;
    std::size_t i = 0;
    for (; i + kFloats <= half; i += kFloats) {
        const Vector a = load(x + i), b = load(x + i + half);
        const Vector c = load(cos + i), s = load(sin + i);
        store(out + i, fused(a, c, -(b * s)));
        store(out + i + half, fused(b, c, a * s));
    }
    for (; i < half; ++i) {
        const float a = widen(x[i]), b = widen(x[i + half]);
        out[i] = narrow(fused(a, cos[i], -(b * sin[i])));
        out[i + half] = narrow(fused(b, cos[i], a * sin[i]));
    }
}
