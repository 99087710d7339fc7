// A CUDA runtime, driver, run-time compiler and BLAS that run on the CPU: the part of them that CuPy's core asks for.
// Written from the declarations in CuPy's own sources; none of NVIDIA's code. See README.md.
//
// Kernels are compiled by g++ (nvrtcCompileProgram), loaded by dlopen (cuModuleLoadData) and run as loops over
// grid and block (prelude.h). New device memory is filled with 0xA5, and so is freed memory; bytes behind every block
// are checked when it is freed. A function that is not here fails, and says so (missing.inc, made by build.py).

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "cpucuda_types.h"  // written by compile_cupy.py: the struct layouts that CuPy was compiled with

namespace {

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, MISALIGNED = 716, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801 };
enum { HOST = 1, DEVICE = 2, POISON = 0xA5, GUARD = 0x5A, GUARD_BYTES = 256 };

struct Block { size_t size; int kind; };
std::map<uintptr_t, Block> blocks;  // by address
std::mutex memory_lock, launch_lock;
struct { long compiled, launches, gemms, allocations, misaligned, fetched; } counts;

bool setting(const char* name) { const char* v = getenv(name); return v && *v && *v != '0'; }

const Block* find(const void* p, uintptr_t* start = nullptr) {
    auto it = blocks.upper_bound((uintptr_t)p);
    if (it == blocks.begin()) return nullptr;
    --it;
    if ((uintptr_t)p >= it->first + (it->second.size ? it->second.size : 1)) return nullptr;
    if (start) *start = it->first;
    return &it->second;
}

int allocate(void** out, size_t size, int kind) {
    std::lock_guard<std::mutex> hold(memory_lock);
    void* p = nullptr;
    if (posix_memalign(&p, 256, size + GUARD_BYTES)) return OUT_OF_MEMORY;
    memset(p, POISON, size);
    memset((char*)p + size, GUARD, GUARD_BYTES);
    blocks[(uintptr_t)p] = {size, kind};
    counts.allocations++;
    *out = p;
    return 0;
}

int release(void* p) {
    if (!p) return 0;
    std::lock_guard<std::mutex> hold(memory_lock);
    auto it = blocks.find((uintptr_t)p);
    if (it == blocks.end()) return INVALID_VALUE;
    for (size_t i = 0; i < GUARD_BYTES; i++)
        if (((unsigned char*)p)[it->second.size + i] != GUARD) {
            fprintf(stderr, "cpucuda: a kernel or copy wrote behind a block of %zu bytes\n", it->second.size);
            abort();
        }
    memset(p, POISON, it->second.size);
    blocks.erase(it);
    free(p);
    return 0;
}

int copy(void* to, const void* from, size_t n, int kind) {  // kind: 0 host-host, 1 to device, 2 to host, 3 device, 4 any
    if (!n) return 0;
    {
        std::lock_guard<std::mutex> hold(memory_lock);
        auto inside = [n](const void* p) {
            uintptr_t start;
            const Block* b = find(p, &start);
            return b && b->kind == DEVICE && (uintptr_t)p + n <= start + b->size;
        };
        if ((kind == 1 || kind == 3) && !inside(to)) return INVALID_VALUE;
        if ((kind == 2 || kind == 3) && !inside(from)) return INVALID_VALUE;
    }
    counts.fetched += kind == 2;
    memmove(to, from, n);
    return 0;
}

// Fibres: the threads of a block, when a kernel has barriers. They run one at a time, each until it waits.

extern "C" void cpucuda_switch(void** save, void* load);
asm(R"(
.text
.globl cpucuda_switch
cpucuda_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

enum State { READY, AT_BLOCK, AT_WARP, DONE };
struct Fibre { void* stack; State state; unsigned mask; };
constexpr size_t STACK = 128 << 10;
char* stacks;
std::vector<Fibre> fibres;
void* scheduler;
unsigned current;
void (*body)(unsigned);

void enter() {
    body(current);
    fibres[current].state = DONE;
    cpucuda_switch(&fibres[current].stack, scheduler);
}

void wait(State state, unsigned mask) {
    fibres[current].state = state;
    fibres[current].mask = mask;
    cpucuda_switch(&fibres[current].stack, scheduler);
}

}  // namespace

extern "C" {

int cpucuda_reverse = 0;
char cpucuda_dynamic_shared[1 << 20] __attribute__((aligned(256)));
char cpucuda_lanes[1024][32];  // values that the lanes of a warp exchange

void cpucuda_sync_block() { wait(AT_BLOCK, 0); }
void cpucuda_sync_warp(unsigned mask) { wait(AT_WARP, mask); }
unsigned cpucuda_thread() { return current; }

// Runs one block: thread(i) for all i < n, with barriers. resume(i) sets threadIdx before a thread goes on.
int cpucuda_run_block(unsigned n, void (*thread)(unsigned), void (*resume)(unsigned)) {
    if (!stacks) stacks = (char*)mmap(nullptr, 1024 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    body = thread;
    fibres.assign(n, Fibre{nullptr, READY, 0});
    for (unsigned i = 0; i < n; i++) {
        void** top = (void**)(stacks + (i + 1) * STACK) - 2;  // after `ret`, the stack is as after a call
        *top = (void*)enter;
        fibres[i].stack = top - 6;
    }
    for (;;) {
        unsigned done = 0, at_block = 0, released = 0;
        for (unsigned i = 0; i < n; i++) {
            current = cpucuda_reverse ? n - 1 - i : i;
            if (fibres[current].state == READY) {
                resume(current);
                cpucuda_switch(&scheduler, fibres[current].stack);
            }
            done += fibres[current].state == DONE;
            at_block += fibres[current].state == AT_BLOCK;
        }
        if (done == n) return 0;
        if (done + at_block == n) {  // CUDA asks that all threads come to a barrier; those that have ended do not count
            for (auto& f : fibres) if (f.state == AT_BLOCK) f.state = READY;
            continue;
        }
        for (unsigned w = 0; w < n; w += 32) {  // a warp goes on when all the lanes that were named wait
            unsigned waiting = 0, live = 0, mask = 0;
            for (unsigned i = w; i < n && i < w + 32; i++) {
                if (fibres[i].state != DONE) live |= 1u << (i - w);
                if (fibres[i].state == AT_WARP) waiting |= 1u << (i - w), mask |= fibres[i].mask;
            }
            if (!waiting || (mask & live & ~waiting)) continue;
            for (unsigned i = w; i < n && i < w + 32; i++)
                if (fibres[i].state == AT_WARP) fibres[i].state = READY, released++;
        }
        if (!released) return fprintf(stderr, "cpucuda: threads of a block wait at different barriers\n"), LAUNCH_FAILED;
    }
}

// Kernels are compiled with -fsanitize=alignment, which calls these: an access that a GPU refuses, and x86 does not.
void __ubsan_handle_type_mismatch_v1(void*, void*) { counts.misaligned++; }
void __ubsan_handle_alignment_assumption(void*, void*, void*, void*) { counts.misaligned++; }

int cpucuda_missing(const char* name, int status) {
    fprintf(stderr, "cpucuda: %s is not implemented\n", name);
    return status;
}

// ---------------------------------------------------------------------------------------------------------- runtime

const char* cudaGetErrorName(int e) { return e == INVALID_VALUE ? "cudaErrorInvalidValue" : e == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : e == NOT_SUPPORTED ? "cudaErrorNotSupported" : e == MISALIGNED ? "cudaErrorMisalignedAddress" : "cudaError"; }
const char* cudaGetErrorString(int e) { return e == NOT_SUPPORTED ? "not implemented on the CPU" : "see cpucuda.cpp"; }
int cudaGetLastError() { return 0; }
int cudaDriverGetVersion(int* v) { return *v = 13000, 0; }
int cudaRuntimeGetVersion(int* v) { return *v = 13000, 0; }
int cudaGetDeviceCount(int* n) { return *n = 1, 0; }
int cudaGetDevice(int* d) { return *d = 0, 0; }
int cudaSetDevice(int d) { return d == 0 ? 0 : 101; }
int cudaDeviceSynchronize() { return 0; }
int cudaDeviceGetAttribute(int* v, int attribute, int) {
    switch (attribute) {  // numbers as in CuPy's _runtime_enum.pxd
        case 1: *v = 1024; break;          // threads per block
        case 2: case 3: *v = 1024; break;  // block dimensions
        case 4: *v = 64; break;
        case 5: *v = 2147483647; break;  // grid dimensions
        case 6: case 7: *v = 65535; break;
        case 8: *v = 49152; break;  // shared memory per block
        case 10: *v = 32; break;    // warp
        case 16: *v = 8; break;     // multiprocessors
        case 39: *v = 2048; break;  // threads per multiprocessor
        case 75: *v = 8; break;     // compute capability 8.0
        case 76: *v = 0; break;
        default: *v = 0;
    }
    return 0;
}
int cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "CPU (cpucuda)");
    p->totalGlobalMem = (size_t)8 << 30;
    p->sharedMemPerBlock = 49152;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = 8;
    p->multiProcessorCount = 8;
    p->maxThreadsPerMultiProcessor = 2048;
    p->unifiedAddressing = 1;
    return 0;
}
int cudaDeviceGetPCIBusId(char* s, int n, int) { return snprintf(s, n, "0000:00:00.0"), 0; }
int cudaDeviceCanAccessPeer(int* v, int, int) { return *v = 0, 0; }
int cudaMalloc(void** p, size_t n) { return allocate(p, n, DEVICE); }
int cudaMallocManaged(void** p, size_t n, unsigned) { return allocate(p, n, DEVICE); }
int cudaMallocAsync(void** p, size_t n, void*) { return allocate(p, n, DEVICE); }
int cudaHostAlloc(void** p, size_t n, unsigned) { return allocate(p, n, HOST); }
int cudaFree(void* p) { return release(p); }
int cudaFreeAsync(void* p, void*) { return release(p); }
int cudaFreeHost(void* p) { return release(p); }
int cudaMemGetInfo(size_t* free, size_t* total) { return *free = (size_t)4 << 30, *total = (size_t)8 << 30, 0; }
int cudaMemcpy(void* to, const void* from, size_t n, int kind) { return copy(to, from, n, kind); }
int cudaMemcpyAsync(void* to, const void* from, size_t n, int kind, void*) { return copy(to, from, n, kind); }
int cudaMemset(void* p, int v, size_t n) { return memset(p, v, n), 0; }
int cudaMemsetAsync(void* p, int v, size_t n, void*) { return memset(p, v, n), 0; }
int cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    std::lock_guard<std::mutex> hold(memory_lock);
    const Block* b = find(p);
    a->type = b ? b->kind : 0;
    a->device = b ? 0 : -2;
    a->devicePointer = b ? (void*)p : nullptr;
    a->hostPointer = b && b->kind == DEVICE ? nullptr : (void*)p;
    return 0;
}
int cudaStreamCreate(void** s) { return *s = malloc(8), 0; }
int cudaStreamCreateWithFlags(void** s, unsigned) { return *s = malloc(8), 0; }
int cudaStreamCreateWithPriority(void** s, unsigned, int) { return *s = malloc(8), 0; }
int cudaStreamDestroy(void* s) { return free(s), 0; }
int cudaStreamSynchronize(void*) { return 0; }
int cudaStreamQuery(void*) { return 0; }
int cudaStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cudaStreamIsCapturing(void*, int* v) { return *v = 0, 0; }
int cudaLaunchHostFunc(void*, void (*f)(void*), void* data) { return f(data), 0; }
int cudaEventCreate(void** e) { return *e = calloc(1, sizeof(double)), 0; }
int cudaEventCreateWithFlags(void** e, unsigned) { return cudaEventCreate(e); }
int cudaEventDestroy(void* e) { return free(e), 0; }
int cudaEventRecord(void* e, void*) {
    *(double*)e = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
    return 0;
}
int cudaEventQuery(void*) { return 0; }
int cudaEventSynchronize(void*) { return 0; }
int cudaEventElapsedTime(float* ms, void* a, void* b) { return *ms = *(double*)b - *(double*)a, 0; }
int cudaProfilerStart() { return 0; }
int cudaProfilerStop() { return 0; }

// ----------------------------------------------------------------------------------------------------------- driver

typedef int (*Launcher)(const unsigned*, void**, unsigned);
struct Function { Launcher launch; std::string name; };

int cuGetErrorName(int e, const char** s) { return *s = cudaGetErrorName(e), 0; }
int cuGetErrorString(int e, const char** s) { return *s = cudaGetErrorString(e), 0; }
int cuCtxGetCurrent(void** c) { return *c = (void*)&counts, 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxGetDevice(int* d) { return *d = 0, 0; }
int cuStreamGetCtx(void*, void** c) { return *c = (void*)&counts, 0; }
int cuModuleLoad(void** m, const char* path) { return (*m = dlopen(path, RTLD_NOW | RTLD_LOCAL)) ? 0 : NOT_FOUND; }
int cuModuleLoadData(void** m, const void* image) {
    auto* elf = (const Elf64_Ehdr*)image;
    if (memcmp(elf->e_ident, ELFMAG, SELFMAG)) return 200;
    size_t size = elf->e_shoff + (size_t)elf->e_shentsize * elf->e_shnum;
    int fd = memfd_create("kernel", 0);
    if (fd < 0 || write(fd, image, size) != (ssize_t)size) return OUT_OF_MEMORY;
    std::string path = "/proc/self/fd/" + std::to_string(fd);
    *m = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!*m) fprintf(stderr, "cpucuda: %s\n", dlerror());
    // The descriptor stays open: dlopen knows libraries by their path, and a number used again would be taken for it.
    return *m ? 0 : 200;
}
int cuModuleUnload(void*) { return 0; }  // kernels are few, and functions may still point here
int cuModuleGetFunction(void** f, void* m, const char* name) {
    void* p = dlsym(m, (std::string("cpucuda_launch_") + name).c_str());
    if (!p) return NOT_FOUND;
    *f = new Function{(Launcher)p, name};
    return 0;
}
int cuModuleGetGlobal_v2(void** p, size_t* n, void* m, const char* name) {
    *n = 0;
    return (*p = dlsym(m, name)) ? 0 : NOT_FOUND;
}
int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void*, void** params, void**) {
    if ((size_t)bx * by * bz > 1024 || shared > sizeof cpucuda_dynamic_shared) return INVALID_VALUE;
    std::lock_guard<std::mutex> hold(launch_lock);
    counts.launches++;
    if (setting("CPUCUDA_NO_EXECUTION")) return 0;
    unsigned dims[6] = {gx, gy, gz, bx, by, bz};
    if (shared) memset(cpucuda_dynamic_shared, POISON, shared);
    cpucuda_reverse = setting("CPUCUDA_REVERSE");
    long before = counts.misaligned;
    int status = ((Function*)f)->launch(dims, params, shared);
    return status ? status : counts.misaligned > before ? MISALIGNED : 0;
}
int cuFuncGetAttribute(int* v, int attribute, void*) { return *v = attribute == 0 ? 1024 : 0, 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void*, int, size_t) { return *n = 1, 0; }
int cuOccupancyMaxPotentialBlockSize(int* grid, int* block, void*, void*, size_t, int) { return *grid = 8, *block = 256, 0; }

// --------------------------------------------------------------------------------------------- run-time compilation

struct Program { std::string source, log, image; std::vector<std::string> names, lowered; };

const char* nvrtcGetErrorString(int e) { return e == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }
int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
int nvrtcGetNumSupportedArchs(int* n) { return *n = 1, 0; }
int nvrtcGetSupportedArchs(int* a) { return *a = 80, 0; }
int nvrtcCreateProgram(Program** p, const char* source, const char*, int, const char**, const char**) {
    return *p = new Program{source, "", "", {}, {}}, 0;
}
int nvrtcDestroyProgram(Program** p) { return delete *p, *p = nullptr, 0; }
int nvrtcAddNameExpression(Program* p, const char* name) { return p->names.push_back(name), 0; }

static std::string slurp(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

static int run(std::vector<std::string> command, const std::string& log) {
    pid_t child = fork();
    if (child == 0) {
        if (!freopen(log.c_str(), "w", stderr)) _exit(1);
        std::vector<char*> argv;
        for (auto& word : command) argv.push_back(word.data());
        argv.push_back(nullptr);
        execvp(argv[0], argv.data());
        _exit(127);
    }
    int status = 1;
    waitpid(child, &status, 0);
    return status;
}

int nvrtcCompileProgram(Program* p, int n, const char** options) {
    std::string text = p->source;
    if (text.find_first_not_of(" \n\t") == std::string::npos) return p->image = "// cpucuda\n", 0;  // CuPy asks who compiles
    if (const char* mutation = getenv("CPUCUDA_MUTATION")) {  // "regex=replacement", to see whether tests fail
        std::string m = mutation;
        size_t at = m.find('=');
        text = std::regex_replace(text, std::regex(m.substr(0, at)), m.substr(at + 1));
    }
    bool fibres = std::regex_search(text, std::regex("__sync|__shfl|__any|__all|__ballot|__activemask|cooperative_groups"));
    text = std::regex_replace(text, std::regex(R"(extern\s+__shared__\s+([\w\s:<>]+?)\s*(\w+)\s*\[\s*\])"), "$1* $2 = ($1*)cpucuda_dynamic_shared");
    // every kernel gets a function that takes its arguments from an array of pointers, as the driver does
    std::string launchers = "\n";
    std::regex kernel(R"((template\s*<[^;{]*>\s*)?(?:extern\s*"C"\s*)?__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\()");
    for (std::sregex_iterator it(text.begin(), text.end(), kernel), end; it != end; ++it)
        if (!(*it)[1].matched) launchers += "CPUCUDA_KERNEL(" + (*it)[2].str() + ", " + (*it)[2].str() + ")\n";
    for (size_t i = 0; i < p->names.size(); i++) {
        p->lowered.push_back("expression_" + std::to_string(i));
        launchers += "CPUCUDA_KERNEL(" + p->lowered[i] + ", " + p->names[i] + ")\n";
    }
    const char* temporary = getenv("TMPDIR");
    std::string directory = std::string(temporary ? temporary : P_tmpdir) + "/cpucuda-XXXXXX";
    if (!mkdtemp(directory.data())) return 1;
    std::string base = directory + "/kernel";
    std::ofstream(base + ".cpp") << "#define CPUCUDA_FIBRES " << fibres << "\n" << text << launchers;
    Dl_info here;
    dladdr((void*)&nvrtcCompileProgram, &here);
    std::string home = here.dli_fname;
    home = home.substr(0, home.rfind('/'));
    std::vector<std::string> command = {CPUCUDA_CXX, "-c", "-include", home + "/include/prelude.h", "-I" + home + "/include"};
    std::istringstream flags(CPUCUDA_KERNELS);  // given by build.py
    for (std::string flag; flags >> flag;) command.push_back(flag);
    for (int i = 0; i < n; i++) {
        std::string o = options[i];
        if (o.rfind("-I", 0) == 0 || o.rfind("-D", 0) == 0 || o.rfind("-U", 0) == 0) command.push_back(o);
    }
    command.insert(command.end(), {base + ".cpp", "-o", base + ".o"});
    int status = run(command, base + ".log");
    if (!status) status = run({command[0], "-shared", base + ".o", "-o", base + ".so"}, base + ".log");  // without libubsan
    p->log = slurp(base + ".log");
    p->image = slurp(base + ".so");
    counts.compiled++;
    if (const char* keep = getenv("CPUCUDA_KEEP")) {
        std::ofstream(std::string(keep) + "/" + std::to_string(getpid()) + "-" + std::to_string(counts.compiled) + ".cpp") << text << launchers;
    }
    for (const char* end : {".cpp", ".o", ".so", ".log"}) unlink((base + end).c_str());
    rmdir(directory.c_str());
    return status == 0 && !p->image.empty() ? 0 : 6;
}
int nvrtcGetCUBINSize(Program* p, size_t* n) { return *n = p->image.size() + 1, 0; }
int nvrtcGetCUBIN(Program* p, char* out) { return memcpy(out, p->image.data(), p->image.size()), out[p->image.size()] = 0, 0; }
int nvrtcGetPTXSize(Program* p, size_t* n) { return nvrtcGetCUBINSize(p, n); }
int nvrtcGetPTX(Program* p, char* out) { return nvrtcGetCUBIN(p, out); }
int nvrtcGetProgramLogSize(Program* p, size_t* n) { return *n = p->log.size() + 1, 0; }
int nvrtcGetProgramLog(Program* p, char* out) { return memcpy(out, p->log.c_str(), p->log.size() + 1), 0; }
int nvrtcGetLoweredName(Program* p, const char* name, const char** out) {
    for (size_t i = 0; i < p->names.size(); i++)
        if (p->names[i] == name) return *out = p->lowered[i].c_str(), 0;
    return 10;
}

// ------------------------------------------------------------------------------------------------------------- BLAS

int cublasCreate(void** h) { return *h = malloc(8), 0; }
int cublasDestroy(void* h) { return free(h), 0; }
int cublasGetVersion(void*, int* v) { return *v = 130000, 0; }
int cublasSetStream(void*, void*) { return 0; }
int cublasGetStream(void*, void** s) { return *s = nullptr, 0; }
int cublasSetMathMode(void*, int) { return 0; }
int cublasGetMathMode(void*, int* m) { return *m = 0, 0; }
int cublasSetPointerMode(void*, int) { return 0; }
int cublasGetPointerMode(void*, int* m) { return *m = 0, 0; }

}  // extern "C"

namespace {

struct bf16 {
    uint16_t bits;
    operator float() const { uint32_t u = (uint32_t)bits << 16; float f; memcpy(&f, &u, 4); return f; }
    bf16() = default;
    bf16(float f) {
        uint32_t u; memcpy(&u, &f, 4);
        bits = f != f ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    }
};

template <class S> S conjugate(S x) { return x; }
template <class R> std::complex<R> conjugate(std::complex<R> x) { return std::conj(x); }

// C = alpha op(A) op(B) + beta C, by columns; S is what is summed in. Both factors are copied so that sums run along rows.
template <class T, class S>
void gemm(int ta, int tb, int m, int n, int k, S alpha, const T* A, int lda, const T* B, int ldb, S beta, T* C, int ldc) {
    std::vector<S> a((size_t)m * k), b((size_t)n * k);
    for (int i = 0; i < m; i++)
        for (int l = 0; l < k; l++) {
            S x = (S)(ta ? A[l + (size_t)i * lda] : A[i + (size_t)l * lda]);
            a[(size_t)i * k + l] = ta == 2 ? conjugate(x) : x;
        }
    for (int j = 0; j < n; j++)
        for (int l = 0; l < k; l++) {
            S x = (S)(tb ? B[j + (size_t)l * ldb] : B[l + (size_t)j * ldb]);
            b[(size_t)j * k + l] = tb == 2 ? conjugate(x) : x;
        }
    for (int j = 0; j < n; j++)
        for (int i = 0; i < m; i++) {
            constexpr int W = 8;
            const S *x = &a[(size_t)i * k], *y = &b[(size_t)j * k];
            S part[W] = {}, sum = S(0);
            int l = 0;
            for (; l + W <= k; l += W)
                for (int w = 0; w < W; w++) part[w] += x[l + w] * y[l + w];
            for (; l < k; l++) sum += x[l] * y[l];
            for (int w = 0; w < W; w++) sum += part[w];
            T& c = C[i + (size_t)j * ldc];
            c = beta == S(0) ? (T)(alpha * sum) : (T)(alpha * sum + beta * (S)c);
        }
}

template <class T, class S>
int batched(int ta, int tb, int m, int n, int k, const void* alpha, const void* A, int lda, long long sa, const void* B, int ldb,
            long long sb, const void* beta, void* C, int ldc, long long sc, int count) {
    counts.gemms++;
    if (setting("CPUCUDA_NO_GEMM")) return 0;
    for (int i = 0; i < count; i++)
        gemm<T, S>(ta, tb, m, n, k, *(const S*)alpha, (const T*)A + i * sa, lda, (const T*)B + i * sb, ldb, *(const S*)beta, (T*)C + i * sc, ldc);
    return 0;
}

typedef std::complex<float> c64;
typedef std::complex<double> c128;

int by_type(int type, int ta, int tb, int m, int n, int k, const void* alpha, const void* A, int lda, long long sa, const void* B,
            int ldb, long long sb, const void* beta, void* C, int ldc, long long sc, int count) {
    switch (type) {  // cudaDataType
        case 0: return batched<float, float>(ta, tb, m, n, k, alpha, A, lda, sa, B, ldb, sb, beta, C, ldc, sc, count);
        case 1: return batched<double, double>(ta, tb, m, n, k, alpha, A, lda, sa, B, ldb, sb, beta, C, ldc, sc, count);
        case 2: return batched<_Float16, float>(ta, tb, m, n, k, alpha, A, lda, sa, B, ldb, sb, beta, C, ldc, sc, count);
        case 4: return batched<c64, c64>(ta, tb, m, n, k, alpha, A, lda, sa, B, ldb, sb, beta, C, ldc, sc, count);
        case 5: return batched<c128, c128>(ta, tb, m, n, k, alpha, A, lda, sa, B, ldb, sb, beta, C, ldc, sc, count);
        case 14: return batched<bf16, float>(ta, tb, m, n, k, alpha, A, lda, sa, B, ldb, sb, beta, C, ldc, sc, count);
    }
    return cpucuda_missing("a product of this type", 15);
}

}  // namespace

extern "C" {

#define GEMM(X, T)                                                                                                                        \
    int cublas##X##gemm(void*, int ta, int tb, int m, int n, int k, const T* alpha, const T* A, int lda, const T* B, int ldb,             \
                        const T* beta, T* C, int ldc) {                                                                                   \
        return batched<T, T>(ta, tb, m, n, k, alpha, A, lda, 0, B, ldb, 0, beta, C, ldc, 0, 1);                                           \
    }                                                                                                                                     \
    int cublas##X##gemmStridedBatched(void*, int ta, int tb, int m, int n, int k, const T* alpha, const T* A, int lda, long long sa,      \
                                      const T* B, int ldb, long long sb, const T* beta, T* C, int ldc, long long sc, int count) {         \
        return batched<T, T>(ta, tb, m, n, k, alpha, A, lda, sa, B, ldb, sb, beta, C, ldc, sc, count);                                    \
    }                                                                                                                                     \
    int cublas##X##gemmBatched(void*, int ta, int tb, int m, int n, int k, const T* alpha, const T** A, int lda, const T** B, int ldb,    \
                               const T* beta, T** C, int ldc, int count) {                                                                \
        for (int i = 0; i < count; i++) batched<T, T>(ta, tb, m, n, k, alpha, A[i], lda, 0, B[i], ldb, 0, beta, C[i], ldc, 0, 1);         \
        return 0;                                                                                                                         \
    }                                                                                                                                     \
    int cublas##X##gemv(void*, int t, int m, int n, const T* alpha, const T* A, int lda, const T* x, int dx, const T* beta, T* y, int dy) { \
        if (dy != 1) return cpucuda_missing("gemv with a stride of its result", 15);                                                      \
        int rows = t ? n : m, inner = t ? m : n;                                                                                          \
        return batched<T, T>(t, 1, rows, 1, inner, alpha, A, lda, 0, x, dx, 0, beta, y, rows, 0, 1);                                      \
    }
GEMM(S, float)
GEMM(D, double)
GEMM(C, c64)
GEMM(Z, c128)

int cublasSgemmEx(void*, int ta, int tb, int m, int n, int k, const float* alpha, const void* A, int at, int lda, const void* B, int bt,
                  int ldb, const float* beta, void* C, int ct, int ldc) {
    if (at != bt || at != ct) return cpucuda_missing("SgemmEx of mixed types", 15);
    return by_type(at, ta, tb, m, n, k, alpha, A, lda, 0, B, ldb, 0, beta, C, ldc, 0, 1);
}
int cublasGemmEx(void*, int ta, int tb, int m, int n, int k, const void* alpha, const void* A, int at, int lda, const void* B, int bt,
                 int ldb, const void* beta, void* C, int ct, int ldc, int, int) {
    if (at != bt || at != ct) return cpucuda_missing("GemmEx of mixed types", 15);
    return by_type(at, ta, tb, m, n, k, alpha, A, lda, 0, B, ldb, 0, beta, C, ldc, 0, 1);
}
int cublasGemmEx_v11(void* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* A, int at, int lda, const void* B,
                     int bt, int ldb, const void* beta, void* C, int ct, int ldc, int compute, int algorithm) {
    return cublasGemmEx(h, ta, tb, m, n, k, alpha, A, at, lda, B, bt, ldb, beta, C, ct, ldc, compute, algorithm);
}
int cublasGemmStridedBatchedEx(void*, int ta, int tb, int m, int n, int k, const void* alpha, const void* A, int at, int lda,
                               long long sa, const void* B, int bt, int ldb, long long sb, const void* beta, void* C, int ct, int ldc,
                               long long sc, int count, int, int) {
    if (at != bt || at != ct) return cpucuda_missing("GemmStridedBatchedEx of mixed types", 15);
    return by_type(at, ta, tb, m, n, k, alpha, A, lda, sa, B, ldb, sb, beta, C, ldc, sc, count);
}
int cublasGemmStridedBatchedEx_v11(void* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* A, int at, int lda,
                                   long long sa, const void* B, int bt, int ldb, long long sb, const void* beta, void* C, int ct,
                                   int ldc, long long sc, int count, int compute, int algorithm) {
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, A, at, lda, sa, B, bt, ldb, sb, beta, C, ct, ldc, sc, count, compute, algorithm);
}

// For tests: launches of kernels and of products, and copies to the host, so far.
void cpucuda_counts(long* two) { two[0] = counts.launches + counts.gemms, two[1] = counts.fetched; }

#include "missing.inc"

}  // extern "C"

namespace {
struct Report {
    ~Report() {
        if (const char* path = getenv("CPUCUDA_STATISTICS")) {
            std::ofstream(path, std::ios::app) << "compiled " << counts.compiled << " launches " << counts.launches << " gemms "
                << counts.gemms << " allocations " << counts.allocations << " misaligned " << counts.misaligned << "\n";
        }
    }
} report;
}  // namespace
