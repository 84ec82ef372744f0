// Preloaded library: file system calls below a folder fail from the k-th one on, in all processes that share the state.
// State file (mapped): int64 calls seen, int64 first failing call (0: none), int64 errno, int64 last failing call (0: all later ones), char[4096] folder, log.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct state {
    int64_t calls, first, error, last;
    char folder[4096];
    char log[1 << 20];
    int64_t log_used;
};

static struct state *state_of(void) {
    static struct state *found;
    static int looked;
    if (!looked) {
        looked = 1;
        const char *path = getenv("FAULT_FS_STATE");
        int fd = path ? (int)open64(path, O_RDWR | O_CLOEXEC) : -1;
        if (fd >= 0) {
            void *at = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (at != MAP_FAILED) found = at;
            close(fd);
        }
    }
    return found;
}

static int below(const struct state *state, const char *path) {
    size_t length = strlen(state->folder);
    return length && strncmp(path, state->folder, length) == 0;
}

// Counts the call `name` on `path`; 1: it must fail.
static int fails(const char *name, const char *path) {
    struct state *state = state_of();
    if (!state || !below(state, path)) return 0;
    int64_t number = __atomic_add_fetch(&state->calls, 1, __ATOMIC_SEQ_CST);
    char line[4200];
    int size = snprintf(line, sizeof line, "%s %s\n", name, path + strlen(state->folder));
    int64_t at = __atomic_fetch_add(&state->log_used, size, __ATOMIC_SEQ_CST);
    if (at + size < (int64_t)sizeof state->log) memcpy(state->log + at, line, size);
    int64_t first = state->first;
    if (!first || number < first || (state->last && number > state->last)) return 0;
    errno = (int)state->error;
    return 1;
}

static int fails_fd(const char *name, int fd) {
    struct state *state = state_of();
    if (!state || fd < 3) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    return fails(name, path);
}

static int fails_at(const char *name, const char *path) {
    if (!state_of()) return 0;
    char whole[8192];
    if (path[0] != '/') {
        if (!getcwd(whole, 4000)) return 0;
        strcat(whole, "/");
        strncat(whole, path, 4000);
        path = whole;
    }
    return fails(name, path);
}

#define REAL(type, name) static type (*real)(); if (!real) real = (type(*)())dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) { REAL(ssize_t, write); return fails_fd("write", fd) ? -1 : real(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { REAL(ssize_t, pwrite); return fails_fd("write", fd) ? -1 : real(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { REAL(ssize_t, pwrite64); return fails_fd("write", fd) ? -1 : real(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *data, int count) { REAL(ssize_t, writev); return fails_fd("write", fd) ? -1 : real(fd, data, count); }
int fsync(int fd) { REAL(int, fsync); return fails_fd("fsync", fd) ? -1 : real(fd); }
int mkdir(const char *path, mode_t mode) { REAL(int, mkdir); return fails_at("mkdir", path) ? -1 : real(path, mode); }
int rename(const char *from, const char *to) { REAL(int, rename); return fails_at("rename", to) ? -1 : real(from, to); }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if ((flags & (O_CREAT | O_WRONLY | O_RDWR)) && fails_at((flags & O_CREAT) ? "create" : "open", path)) return -1; \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(int, name); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if ((flags & (O_CREAT | O_WRONLY | O_RDWR)) && (folder == AT_FDCWD || path[0] == '/') && fails_at((flags & O_CREAT) ? "create" : "open", path)) return -1; \
        return real(folder, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)
