// Runs FileReader with system calls that fail on demand. It is built with AddressSanitizer and with
// ThreadSanitizer, which also detects a descriptor that is closed while another thread reads it.
// Takes a folder to write in. Prints nothing and exits 0 when every check held.
#include "queue/file_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"

#ifndef O_DIRECT
#define O_DIRECT 0
#endif

namespace {

using namespace moeinf;

constexpr std::size_t kBytes = 5 * kPageBytes + 123;
std::string folder;

struct alignas(kPageBytes) Slot {
    std::byte bytes[6 * kPageBytes] = {};
};

std::vector<char> content(int file) {
    std::vector<char> bytes(kPageBytes + kBytes);
    for (std::size_t i = 0; i < bytes.size(); ++i)
        bytes[i] = static_cast<char>(i * 7 + i / 251 + static_cast<std::size_t>(file));
    return bytes;
}

std::string make_file(int file) {
    const std::string path = folder + "/" + std::to_string(file);
    const auto bytes = content(file);
    std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
    return path;
}

bool right(const Slot& slot, int file) {
    return std::memcmp(slot.bytes, content(file).data() + kPageBytes, kBytes) == 0;
}

// Fault state, one test at a time: how many of the next calls fail, and how.
int fail_opens = 0, open_errno = 0, fail_direct_opens = 0;
int fail_reads = 0, read_errno = 0, fail_direct_reads = 0;
std::size_t largest_read = 1 << 30;
int opens = 0, reads = 0, direct_reads = 0;

FileCalls faulty() {
    FileCalls calls;
    calls.open = [](const char* path, int flags) {
        ++opens;
        if ((O_DIRECT & flags) && fail_direct_opens-- > 0) return errno = EINVAL, -1;
        if (fail_opens-- > 0) return errno = open_errno, -1;
        return ::open(path, flags);
    };
    calls.pread = [](int file, void* to, std::size_t bytes, off_t offset) -> ssize_t {
        ++reads;
        const bool direct = (fcntl(file, F_GETFL) & O_DIRECT) != 0;
        direct_reads += direct;
        if (direct && fail_direct_reads-- > 0) return errno = EINVAL, -1;
        if (fail_reads-- > 0) return errno = read_errno, -1;
        const std::size_t want = std::min(bytes, largest_read);
        // A short direct read reports fewer bytes than it fetched: the length must stay aligned.
        const ssize_t got = ::pread(file, to, direct ? bytes : want, offset);
        return std::min(got, static_cast<ssize_t>(want));
    };
    return calls;
}

void reset() {
    fail_opens = fail_direct_opens = fail_reads = fail_direct_reads = opens = reads = 0;
    largest_read = 1 << 30;
}

// Returns the errno and kind of read()'s error, or 0.
int failing_code(FileReader& reader, const std::string& path, Slot& slot) {
    try {
        reader.read(path, kPageBytes, kBytes, slot.bytes);
    } catch (const Failed& error) {
        CHECK(error.failure()->path == path);
        return error.failure()->code;
    }
    return 0;
}

void short_and_interrupted_reads(bool direct) {
    reset();
    FileReader reader({direct, 4, kMaxBlockBytes, faulty()});
    const std::string path = make_file(1);
    for (const std::size_t largest : {std::size_t{1000}, kPageBytes, std::size_t{7}}) {
        Slot slot;
        largest_read = largest;
        fail_reads = 25;
        read_errno = EINTR;
        CHECK(failing_code(reader, path, slot) == 0);
        CHECK(right(slot, 1));
    }
}

void eio_is_retried_twice() {
    for (const int failures : {2, 3}) {
        reset();
        FileReader reader({false, 4, kMaxBlockBytes, faulty()});
        Slot slot;
        fail_reads = failures;
        read_errno = EIO;
        CHECK(failing_code(reader, make_file(2), slot) == (failures == 3 ? EIO : 0));
        CHECK(reads == 3);
        CHECK(failing_code(reader, folder + "/2", slot) == 0 && right(slot, 2));
    }
}

// One file refuses O_DIRECT, at its open or at its first read: only it is read through the page
// cache.
void refused_direct_concerns_one_file() {
    if (O_DIRECT == 0) return;
    for (const bool at_open : {true, false}) {
        reset();
        FileReader reader({true, 4, kMaxBlockBytes, faulty()});
        (at_open ? fail_direct_opens : fail_direct_reads) = 1;
        for (int file = 3; file < 6; ++file) {
            Slot slot;
            CHECK(failing_code(reader, make_file(file), slot) == 0);
            CHECK(right(slot, file));
            CHECK(reader.direct() && reader.direct_refusals() == 1);
        }
        CHECK(opens == 4);  // one more for the file that refused
        const int direct_before = direct_reads;
        for (int file = 3; file < 6; ++file) {
            Slot slot;
            CHECK(failing_code(reader, folder + "/" + std::to_string(file), slot) == 0);
        }
        CHECK(opens == 4 && direct_reads == direct_before + 2);
    }
}

void reads_go_in_blocks() {
    reset();
    FileReader reader({false, 4, 2 * kPageBytes, faulty()});
    Slot slot;
    CHECK(failing_code(reader, make_file(1), slot) == 0 && right(slot, 1));
    CHECK(reads == 3);  // 5 pages and 123 bytes
    for (const std::size_t wrong : {std::size_t{0}, kPageBytes + 1, kMaxBlockBytes + kPageBytes}) {
        try {
            FileReader refused({false, 4, wrong, {}});
            CHECK(false);
        } catch (const std::invalid_argument&) {
        }
    }
}

void out_of_descriptors_gives_back_the_cache() {
    reset();
    FileReader reader({false, 8, kMaxBlockBytes, faulty()});
    Slot slot;
    for (int file = 0; file < 3; ++file) CHECK(failing_code(reader, make_file(file), slot) == 0);
    CHECK(reader.open_files() == 3);
    fail_opens = 1;
    open_errno = EMFILE;
    CHECK(failing_code(reader, make_file(7), slot) == 0 && right(slot, 7));
    CHECK(reader.open_files() == 1);
    fail_opens = 1 << 20;
    CHECK(failing_code(reader, make_file(8), slot) == EMFILE);
}

void least_recent_is_closed_first() {
    reset();
    FileReader reader({false, 2, kMaxBlockBytes, faulty()});
    Slot slot;
    for (const int file : {0, 1, 0, 2, 0, 1}) {  // 2 evicts 1; 0 stays; 1 is opened again
        CHECK(failing_code(reader, make_file(file), slot) == 0);
        CHECK(right(slot, file));
    }
    CHECK(opens == 4);
    CHECK(reader.open_files() == 2);
}

void many_threads_few_descriptors() {
    reset();
    for (int file = 0; file < 8; ++file) make_file(file);
    FileReader reader({.max_open_files = 2});
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
        threads.emplace_back([&, t] {
            Slot slot;
            for (int i = 0; i < 200; ++i) {
                const int file = (i * (t + 1) + t) % 8;
                reader.read(folder + "/" + std::to_string(file), kPageBytes, kBytes, slot.bytes);
                CHECK(right(slot, file));
                if (i % 17 == 0) reader.forget(folder + "/" + std::to_string(file));
                CHECK(reader.open_files() <= 2);
            }
        });
    for (auto& thread : threads) thread.join();
}

}  // namespace

int main(int, char** arguments) {
    folder = arguments[1];
    short_and_interrupted_reads(false);
    short_and_interrupted_reads(true);
    eio_is_retried_twice();
    refused_direct_concerns_one_file();
    reads_go_in_blocks();
    out_of_descriptors_gives_back_the_cache();
    least_recent_is_closed_first();
    many_threads_few_descriptors();
}
