/* Intercepts libc: the N-th call that changes a file under one folder fails, or kills the process during the call.
   It can also shift the wall clock. Controlled by shim.py through ctypes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char folder[PATH_MAX];
static int at = 0, counted = 0, fault = 0, hit = 0; /* fault: an errno, or -1 to be killed */
static char last[256];
static long skewed = 0;

void fault_arm(const char *under, int nth, int what) {
    snprintf(folder, sizeof folder, "%s", under);
    at = nth, fault = what, counted = 0, hit = 0;
}
int fault_calls(void) { return counted; }
int fault_hit(void) { return hit; }
const char *fault_last(void) { return last; }
void fault_skew(long seconds) { skewed = seconds; }

#define REAL(name) static __typeof__(&name) real = 0; if (!real) real = dlsym(RTLD_NEXT, #name)

static int ours(const char *path) { return folder[0] && path && !strncmp(path, folder, strlen(folder)); }
static int ours_fd(int fd) {
    char link[64], path[PATH_MAX];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return ours(path);
}
/* Return 1 if this call must fail. */
static int due(const char *call) {
    counted++;
    if (counted != at) return 0;
    hit = 1;
    snprintf(last, sizeof last, "%s", call);
    if (fault != -1) errno = fault;
    return 1;
}
static void die(void) {
    syscall(SYS_write, 9, last, strlen(last)); /* the pipe of attempt.py */
    kill(getpid(), SIGKILL); for (;;) pause();
}
#define FAIL(call) do { if (due(call)) { if (fault == -1) die(); return -1; } } while (0)

ssize_t write(int fd, const void *buffer, size_t count) {
    REAL(write);
    if (ours_fd(fd) && due("write")) {
        if (fault == -1) { real(fd, buffer, count / 2); die(); } /* half of the bytes are written */
        return -1;
    }
    return real(fd, buffer, count);
}
ssize_t pwrite64(int fd, const void *buffer, size_t count, off64_t offset) {
    REAL(pwrite64);
    if (ours_fd(fd)) FAIL("pwrite");
    return real(fd, buffer, count, offset);
}
ssize_t writev(int fd, const struct iovec *vector, int count) {
    REAL(writev);
    if (ours_fd(fd)) FAIL("writev");
    return real(fd, vector, count);
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t count) {
    static ssize_t (*real)(int, int, off64_t *, size_t) = 0;
    if (!real) real = dlsym(RTLD_NEXT, "sendfile64");
    if (ours_fd(out)) FAIL("sendfile");
    return real(out, in, offset, count);
}
int ftruncate64(int fd, off64_t length) {
    REAL(ftruncate64);
    if (ours_fd(fd)) FAIL("ftruncate");
    return real(fd, length);
}
int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
    REAL(fallocate64);
    if (ours_fd(fd)) FAIL("fallocate");
    return real(fd, mode, offset, length);
}
int fsync(int fd) {
    REAL(fsync);
    if (ours_fd(fd)) FAIL("fsync");
    return real(fd);
}
int fdatasync(int fd) {
    REAL(fdatasync);
    if (ours_fd(fd)) FAIL("fdatasync");
    return real(fd);
}
int close(int fd) { /* some file systems report a full disk here */
    REAL(close);
    int written = ours_fd(fd) && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
    if (written && due("close")) {
        if (fault == -1) die();
        int kept = errno;
        real(fd);
        errno = kept;
        return -1;
    }
    return real(fd);
}
#define MODE                                 \
    mode_t mode = 0;                         \
    if (flags & (O_CREAT | O_TMPFILE)) {     \
        va_list more;                        \
        va_start(more, flags);               \
        mode = va_arg(more, mode_t);         \
        va_end(more);                        \
    }
int open64(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...) = 0;
    if (!real) real = dlsym(RTLD_NEXT, "open64");
    MODE
    if ((flags & O_CREAT) && ours(path)) FAIL("open");
    return real(path, flags, mode);
}
int open(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...) = 0;
    if (!real) real = dlsym(RTLD_NEXT, "open");
    MODE
    if ((flags & O_CREAT) && ours(path)) FAIL("open");
    return real(path, flags, mode);
}
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    if (ours(path)) FAIL("mkdir");
    return real(path, mode);
}
int chmod(const char *path, mode_t mode) {
    REAL(chmod);
    if (ours(path)) FAIL("chmod");
    return real(path, mode);
}
int fchmodat(int at_fd, const char *path, mode_t mode, int flags) {
    REAL(fchmodat);
    if (ours(path)) FAIL("chmod");
    return real(at_fd, path, mode, flags);
}
int rename(const char *from, const char *to) {
    REAL(rename);
    if (ours(to)) FAIL("rename");
    return real(from, to);
}
int renameat(int from_fd, const char *from, int to_fd, const char *to) {
    REAL(renameat);
    if (ours(to)) FAIL("rename");
    return real(from_fd, from, to_fd, to);
}

int clock_gettime(clockid_t clock, struct timespec *told) {
    static int (*real)(clockid_t, struct timespec *) = 0;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(clock, told);
    if (clock == CLOCK_REALTIME) told->tv_sec += skewed;
    return done;
}
time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict told, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    told->tv_sec = now.tv_sec, told->tv_usec = now.tv_nsec / 1000;
    return 0;
}
