// Device slots over the fake libcuda: every kernel must see the bytes that were copied for it.
// Linked with -rdynamic, so that the driver finds the fake's calls in this program.
//
// Host slots are filled with a version number, copied, and read by "kernels" (host functions on the
// compute stream, which compare every byte). A slot is overwritten as soon as no batch reads it,
// while another thread page-locks the pool. First come deferred streams with many seeds, then real
// threads.
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "check.h"
#include "device/device_slots.h"
#include "fake_libcuda.cpp"

namespace {

constexpr std::size_t kHostSlots = 7;
constexpr std::size_t kDeviceSlots = 4;
constexpr std::size_t kBytes = 4096;
unsigned seed;
long together = 0, alone = 0;  // calls that copy

struct Kernel {
    const unsigned char* slot;
    unsigned char version;
};

void look(void* data) {
    const std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(data));
    for (std::size_t i = 0; i < kBytes; ++i) CHECK(kernel->slot[i] == kernel->version);
}

class Play {
  public:
    explicit Play(unsigned number) : random_(number) {
        auto driver = std::make_shared<moeinf::Driver>("");
        context_ = std::make_shared<moeinf::Context>(driver, 0);
        pool_ = std::make_shared<moeinf::SlotPool>(kHostSlots, kBytes);
        lock_ = std::make_shared<moeinf::HostLock>(context_, pool_, 2 * kBytes);
        compute_ = context_->make_stream();
        slots_ = std::make_unique<moeinf::DeviceSlots>(context_, lock_, kDeviceSlots, compute_, 1);
        for (std::size_t slot = 0; slot < kHostSlots; ++slot) write(slot);
    }

    ~Play() {
        slots_.reset();
        context_->destroy_stream(compute_);
    }

    // Plays with all slots locked, or locks them from the middle on, beside the steps.
    void run(int steps, bool locked) {
        const auto lock = [this] {
            while (lock_->next_bytes() > 0) lock_->lock_next();
        };
        std::thread locking;
        if (locked) lock();
        for (int step = 0; step < steps; ++step) {
            if (!locked && step == steps / 2) locking = std::thread(lock);
            switch (random_() % 4) {
                case 0:
                    write(random_() % kHostSlots);
                    break;
                case 1:
                    copy();
                    break;
                default:
                    read();
            }
        }
        if (locking.joinable()) locking.join();
        CHECK(lock_->locked_slots() == kHostSlots);
    }

  private:
    std::vector<std::size_t> some(std::size_t of) {
        std::vector<std::size_t> all(of);
        for (std::size_t i = 0; i < of; ++i) all[i] = i;
        std::shuffle(all.begin(), all.end(), random_);
        all.resize(1 + random_() % std::min(of, kDeviceSlots));
        return all;
    }

    void write(std::size_t slot) {
        if (read_by_[slot] != 0 && !slots_->done(read_by_[slot])) {
            if (random_() % 2 == 0) return;
            slots_->wait(read_by_[slot]);
        }
        versions_[slot] = static_cast<unsigned char>(versions_[slot] + 1);
        std::memset(pool_->base() + slot * kBytes, versions_[slot], kBytes);
    }

    void copy() {
        const auto to = some(kDeviceSlots);
        std::vector<std::size_t> from;
        for (std::size_t i = 0; i < to.size(); ++i) from.push_back(random_() % kHostSlots);
        const moeinf::Batch batch = slots_->copy(from, to, kBytes);
        for (std::size_t i = 0; i < to.size(); ++i) {
            read_by_[from[i]] = batch;
            there_[to[i]] = versions_[from[i]];
        }
    }

    void read() {
        const auto which = some(kDeviceSlots);
        slots_->begin_read(which);
        for (const std::size_t slot : which) {
            const auto* at = reinterpret_cast<const unsigned char*>(slots_->base());
            auto kernel = std::make_unique<Kernel>(Kernel{at + slot * kBytes, there_[slot]});
            CHECK(cuLaunchHostFunc(compute_, look, kernel.release()) == 0);
        }
        slots_->end_read(which);
    }

    std::mt19937 random_;
    std::shared_ptr<moeinf::Context> context_;
    std::shared_ptr<moeinf::SlotPool> pool_;
    std::shared_ptr<moeinf::HostLock> lock_;
    moeinf::StreamHandle compute_ = nullptr;
    std::unique_ptr<moeinf::DeviceSlots> slots_;
    unsigned char versions_[kHostSlots] = {};
    unsigned char there_[kDeviceSlots] = {};  // fresh device memory of the fake is zero
    moeinf::Batch read_by_[kHostSlots] = {};
};

void play(const char* mode, unsigned number, int steps) {
    seed = number;
    fake_reset((std::string(mode) + ",seed=" + std::to_string(number)).c_str());
    Play(number).run(steps, number % 2 == 0);
    CHECK(fake_count("allocated") == 0 && fake_count("registered") == 0);
    CHECK(fake_count("handles") == 0);
    together += fake_count("cuMemcpyBatchAsync");
    alone += fake_count("cuMemcpyHtoDAsync");
}

}  // namespace

int main() {
    on_failure = [] { std::fprintf(stderr, "seed %u\n", seed); };
    for (unsigned number = 1; number <= 150; ++number) play("mode=deferred", number, 60);
    for (unsigned number = 1; number <= 4; ++number) play("mode=threads,delay_us=50", number, 150);
    CHECK(together > 100 && alone > 100);
}
