// Calls on files below one folder fail or wait as a rule file says; every other call is passed on as it is. For LD_PRELOAD.
//
// FAULTY_DISK_FOLDER: the folder. FAULTY_DISK_RULES: a file of lines "KIND ERRNO MILLISECONDS", read anew at every call:
// kind is open, read, write, sync, name (rename, unlink, mkdir) or all; an errno of 0 only waits. No file: no fault.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int below(const char *path) {
    const char *folder = getenv("FAULTY_DISK_FOLDER");
    return folder != NULL && path != NULL && strncmp(path, folder, strlen(folder)) == 0;
}

static int descriptor_below(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    return below(path);
}

// 0, or the errno with which this call has to fail, after it has waited.
static int fault(const char *kind) {
    const char *rules = getenv("FAULTY_DISK_RULES");
    if (rules == NULL) return 0;
    char text[512], name[32];
    long fd = syscall(SYS_openat, AT_FDCWD, rules, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    long size = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    if (size <= 0) return 0;
    text[size] = 0;
    int number, milliseconds, used;
    for (const char *at = text; sscanf(at, "%31s %d %d\n%n", name, &number, &milliseconds, &used) == 3; at += used) {
        if (strcmp(name, kind) != 0 && strcmp(name, "all") != 0) continue;
        struct timespec wait = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000L};
        nanosleep(&wait, NULL);
        return number;
    }
    return 0;
}

#define FAIL_IF(condition, kind)                 \
    do {                                         \
        int saved = errno, number = 0;           \
        if (condition) number = fault(kind);     \
        errno = number ? number : saved;         \
        if (number) return -1;                   \
    } while (0)

ssize_t write(int fd, const void *data, size_t size) {
    FAIL_IF(descriptor_below(fd), "write");
    return NEXT(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    FAIL_IF(descriptor_below(fd), "write");
    return NEXT(writev)(fd, parts, count);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    FAIL_IF(descriptor_below(fd), "write");
    return NEXT(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    FAIL_IF(descriptor_below(fd), "write");
    return NEXT(pwrite64)(fd, data, size, at);
}
ssize_t read(int fd, void *data, size_t size) {
    FAIL_IF(descriptor_below(fd), "read");
    return NEXT(read)(fd, data, size);
}
ssize_t pread(int fd, void *data, size_t size, off_t at) {
    FAIL_IF(descriptor_below(fd), "read");
    return NEXT(pread)(fd, data, size, at);
}
ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    FAIL_IF(descriptor_below(fd), "read");
    return NEXT(pread64)(fd, data, size, at);
}
int fsync(int fd) {
    FAIL_IF(descriptor_below(fd), "sync");
    return NEXT(fsync)(fd);
}
int fdatasync(int fd) {
    FAIL_IF(descriptor_below(fd), "sync");
    return NEXT(fdatasync)(fd);
}
int ftruncate(int fd, off_t size) {
    FAIL_IF(descriptor_below(fd), "write");
    return NEXT(ftruncate)(fd, size);
}
int ftruncate64(int fd, off64_t size) {
    FAIL_IF(descriptor_below(fd), "write");
    return NEXT(ftruncate64)(fd, size);
}
int rename(const char *from, const char *to) {
    FAIL_IF(below(from) || below(to), "name");
    return NEXT(rename)(from, to);
}
int unlink(const char *path) {
    FAIL_IF(below(path), "name");
    return NEXT(unlink)(path);
}
int mkdir(const char *path, mode_t mode) {
    FAIL_IF(below(path), "name");
    return NEXT(mkdir)(path, mode);
}

// a read-only disk still opens files for reading
static int open_fault(const char *path, int flags) {
    if (!below(path)) return 0;
    int number = fault("open");
    return number == EROFS && (flags & (O_WRONLY | O_RDWR | O_CREAT)) == 0 ? 0 : number;
}
#define OPENS(name, head, call)                                      \
    int name(head const char *path, int flags, ...) {                \
        va_list more;                                                \
        va_start(more, flags);                                       \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                \
        int saved = errno, number = open_fault(path, flags);         \
        errno = number ? number : saved;                             \
        return number ? -1 : call;                                   \
    }
#define AND ,
OPENS(open, , NEXT(open)(path, flags, mode))
OPENS(open64, , NEXT(open64)(path, flags, mode))
OPENS(openat, int folder AND, NEXT(openat)(folder, path, flags, mode))
OPENS(openat64, int folder AND, NEXT(openat64)(folder, path, flags, mode))
