// The kernels' results for fixed inputs: one line "name crc32c" per format, activation and count.
// scripts/check_aarch64.py compares processors; test_drivers.py runs every path under sanitizers.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "check.h"
#include "queue/crc32c.h"
#include "kernels/expert_ffn.h"
#include "kernels/quantise.h"
#include "layer/router.h"
#include "layer/slot_experts.h"

namespace {

using namespace moeinf;

constexpr std::size_t kHidden = 326, kInner = 45, kRows = 16;  // no multiples of a block

// xorshift: the same numbers on every machine.
float next_number() {
    static std::uint32_t state = 2463534242u;
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return static_cast<float>(static_cast<std::int32_t>(state)) / 2147483648.0f;
}

struct alignas(64) Line {
    std::byte bytes[64];
};

// Bytes at a multiple of 64, like a slot's.
class Buffer {
  public:
    explicit Buffer(std::size_t bytes) : lines_((bytes + 63) / 64), bytes_(bytes) {}
    std::byte* data() { return lines_.data()->bytes; }
    std::size_t size() const { return bytes_; }

  private:
    std::vector<Line> lines_;
    std::size_t bytes_;
};

std::byte next_byte() { return static_cast<std::byte>((next_number() + 1) * 127.0f); }

// Writes random codes with scales near 1, of formats that are only made from their own.
void write_codes(std::byte* out, Format format, std::size_t rows, std::size_t columns) {
    if (format == Format::kNvfp4) {
        constexpr std::size_t kBytes = kNvfp4TileBytes / kBlockRows;
        std::vector<std::byte> blocks(rows * ceil_div(columns, kTileColumns) * kBytes);
        for (std::size_t i = 0; i < blocks.size(); ++i)
            blocks[i] = i % kBytes < 4 ? std::byte{0x38} | (next_byte() & std::byte{7})
                                       : next_byte();
        std::vector<float> factors(rows);
        for (float& factor : factors) factor = next_number() / 8;
        interleave_rows(blocks.data(), factors.data(), rows, columns, format, out);
        return;
    }
    const std::size_t bytes = matrix_bytes(format, rows, columns);
    for (std::size_t i = 0; i < bytes; ++i)
        out[i] = i % kMxfp4TileBytes < 512 ? next_byte() : std::byte{124};
}

void write_matrix(std::byte* out, Format format, std::size_t rows, std::size_t columns) {
    if (is_e2m1(format)) return write_codes(out, format, rows, columns);
    std::vector<float> values(rows * columns);
    for (float& value : values) value = next_number() / 4;
    const auto* data = reinterpret_cast<const std::byte*>(values.data());
    if (format == Format::kBf16) {
        auto* halves = reinterpret_cast<std::uint16_t*>(out);
        for (std::size_t i = 0; i < values.size(); ++i) {
            std::uint32_t bits;
            std::memcpy(&bits, &values[i], 4);
            halves[i] = static_cast<std::uint16_t>(bits >> 16);
        }
    } else {
        quantise_rows(data, Dtype::kF32, rows, columns, format, out);
    }
}

std::uint32_t check(const std::vector<float>& values) {
    return crc32c(values.data(), 4 * values.size());
}

void experts(ThreadPool& pool, Format format, const char* name) {
    for (const Activation activation :
         {Activation::kSwiGlu, Activation::kSwiGlu10, Activation::kClampedSwiGlu,
          Activation::kGeGlu, Activation::kRelu, Activation::kRelu2}) {
        const ExpertShape shape{format, format, activation, kHidden, kInner, false};
        Buffer expert(shape.bytes());
        write_matrix(expert.data(), format, kInner, kHidden);
        if (is_gated(activation))
            write_matrix(expert.data() + shape.up_offset(), format, kInner, kHidden);
        write_matrix(expert.data() + shape.down_offset(), format, kHidden, kInner);
        std::vector<float> x(kRows * kHidden);
        for (float& value : x) value = next_number();
        for (const std::size_t count : {std::size_t{1}, std::size_t{5}, std::size_t{11}, kRows}) {
            std::vector<std::int64_t> places(count);
            std::iota(places.begin(), places.end(), 0);
            std::vector<float> out(count * kHidden);
            const ExpertRows rows{expert.data(), places};
            expert_ffn(pool, current_kernels(), shape, {&rows, 1},
                       reinterpret_cast<const std::byte*>(x.data()), 1,
                       reinterpret_cast<std::byte*>(out.data()), Dtype::kF32);
            std::printf("%s-%d-%zu %08x\n", name, static_cast<int>(activation), count, check(out));
        }
    }
}

// Three slots of one layer; expert 2 is absent, and a row has no second expert.
void slots(ThreadPool& pool) {
    constexpr std::size_t kTop = 2, kSlots = 3;
    const ExpertShape shape{Format::kQ4, Format::kQ8, Activation::kSwiGlu, kHidden, kInner, false};
    const std::size_t slot_bytes = ceil_div(shape.bytes(), 64) * 64;
    Buffer arena(kSlots * slot_bytes);
    for (std::size_t s = 0; s < kSlots; ++s) {
        std::byte* const at = arena.data() + s * slot_bytes;
        for (const std::size_t offset : {std::size_t{0}, shape.up_offset()})
            write_matrix(at + offset, Format::kQ4, kInner, kHidden);
        write_matrix(at + shape.down_offset(), Format::kQ8, kHidden, kInner);
    }
    const std::int32_t table[8] = {-1, -1, -1, -1, 2, 0, -4, 1};
    const SlotExperts experts{shape, table, 2, 4, arena.data(), slot_bytes};
    std::vector<float> x(3 * kHidden), out(x.size());
    for (float& value : x) value = next_number();
    std::int64_t ids[] = {3, 0, 1, -1, 0, 3};
    const float weights[] = {0.5f, 0.25f, 2.0f, 1.0f, -1.0f, 0.125f};
    const LayerRouting routing{1, 3, kTop, ids, weights};
    CHECK(count_present(experts, routing) == 5);
    run_present(pool, current_kernels(), experts, routing,
                reinterpret_cast<const std::byte*>(x.data()),
                reinterpret_cast<std::byte*>(out.data()), Dtype::kF32);
    std::printf("slots %08x\n", check(out));
    for (const std::int64_t wrong : {2, 4, -2}) {
        ids[4] = wrong;
        CHECK(count_present(experts, routing) == -1);
    }
    CHECK(count_present(experts, {0, 3, kTop, ids, weights}) == -1);
}

void router(ThreadPool& pool) {
    constexpr std::size_t kExperts = 40, kTop = 6;
    Buffer weight(2 * kExperts * kHidden);
    write_matrix(weight.data(), Format::kBf16, kExperts, kHidden);
    Buffer x(2 * kRows * kHidden);
    write_matrix(x.data(), Format::kBf16, kRows, kHidden);
    std::vector<std::int64_t> ids(kRows * kTop);
    std::vector<float> weights(kRows * kTop);
    const Matrix matrix{weight.data(), Format::kBf16, kExperts, kHidden};
    route(pool, current_kernels(), {matrix, kTop, true, 1.0f, 1, 1}, x.data(), kRows, ids.data(),
          weights.data());
    std::printf("router %08x\n", crc32c(ids.data(), 8 * ids.size()));
}

}  // namespace

// Argument: the path's name, or "" for the fastest one of this processor. Exits with 3 for a path
// that it does not have.
int main(int count, char** arguments) {
    if (!moeinf::use_kernels(count > 1 ? arguments[1] : "")) return 3;
    moeinf::ThreadPool pool(2);
    experts(pool, Format::kQ4, "q4");
    experts(pool, Format::kQ8, "q8");
    experts(pool, Format::kQ3, "q3");
    experts(pool, Format::kQ2, "q2");
    experts(pool, Format::kBf16, "bf16");
    experts(pool, Format::kMxfp4, "mxfp4");
    experts(pool, Format::kQ4k, "q4k");
    experts(pool, Format::kQ5k, "q5k");
    experts(pool, Format::kQ6k, "q6k");
    experts(pool, Format::kNvfp4, "nvfp4");
    slots(pool);
    router(pool);
}
