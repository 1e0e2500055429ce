/* Makes one chosen system call below a folder fail, or kills the process before or after it. For LD_PRELOAD.
 *
 * Every call below the folder is counted from 0, over all names together, and listed as "name path" in memory that is
 * shared with forked children: the parent reads after a child's death what was called and what was disturbed.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stddef.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { TRACE_SIZE = 8 << 20 };
enum mode { COUNT, FAIL, KILL_BEFORE, KILL_AFTER };

static struct {
    long num_calls, num_disturbed, trace_length;
    char trace[TRACE_SIZE];
} *shared;

static struct {
    char folder[PATH_MAX];
    char for_good[PATH_MAX]; /* " open write ": the names that fail again and again after the chosen call */
    long number;
    int error;
    enum mode mode;
} fault;

__attribute__((constructor)) static void share(void)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

/* An empty folder switches everything off. */
void set_fault(const char *folder, long number, int mode, int error, const char *for_good)
{
    memset(shared, 0, offsetof(__typeof__(*shared), trace) + 1);
    snprintf(fault.for_good, sizeof fault.for_good, "%s", for_good);
    fault.number = number, fault.error = error, fault.mode = mode;
    snprintf(fault.folder, sizeof fault.folder, "%s", folder);
}

long num_disturbed(void) { return shared->num_disturbed; }

const char *trace(void) { return shared->trace; }

/* The path of a call, absolute; `path` is NULL where only the descriptor tells it. */
static const char *absolute(int descriptor, const char *path, char *buffer)
{
    char link[64];
    if (path && path[0] == '/')
        return path;
    if (descriptor == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    if (length < 0)
        return "";
    if (path)
        snprintf(buffer + length, PATH_MAX - length, "/%s", path);
    else
        buffer[length] = 0;
    return buffer;
}

static int is_below(const char *path)
{
    size_t length = strlen(fault.folder);
    return !strncmp(path, fault.folder, length) && (path[length] == '/' || !path[length]);
}

/* Counts a call and says what is to be done with it. */
static enum mode reached(const char *name, int descriptor, const char *path)
{
    char buffer[PATH_MAX], word[64];
    int error = errno;
    if (!fault.folder[0])
        return COUNT;
    path = absolute(descriptor, path, buffer);
    errno = error;
    if (!is_below(path))
        return COUNT;
    long number = shared->num_calls++;
    long room = TRACE_SIZE - shared->trace_length - 1;
    int length = snprintf(shared->trace + shared->trace_length, room, "%s %s\n", name, path);
    if (length < room)
        shared->trace_length += length;
    snprintf(word, sizeof word, " %s ", name);
    if (number != fault.number && !(number > fault.number && fault.mode == FAIL && strstr(fault.for_good, word)))
        return COUNT;
    shared->num_disturbed++;
    if (fault.mode == KILL_BEFORE)
        kill(getpid(), SIGKILL);
    return fault.mode;
}

#define REAL(symbol)                             \
    static __typeof__(&symbol) real;             \
    if (!real)                                   \
        real = (__typeof__(&symbol))dlsym(RTLD_NEXT, #symbol)

#define CALL(symbol, type, failed, name, descriptor, path, ...)  \
    {                                                            \
        REAL(symbol);                                            \
        enum mode mode = reached(name, descriptor, path);        \
        if (mode == FAIL) {                                      \
            errno = fault.error;                                 \
            return failed;                                       \
        }                                                        \
        type result = real(__VA_ARGS__);                         \
        if (mode == KILL_AFTER)                                  \
            kill(getpid(), SIGKILL);                             \
        return result;                                           \
    }

#define OPEN_MODE                                                      \
    mode_t permissions = 0;                                            \
    if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {         \
        va_list rest;                                                  \
        va_start(rest, flags);                                         \
        permissions = va_arg(rest, mode_t);                            \
        va_end(rest);                                                  \
    }

static const char *open_name(int flags)
{
    return flags & (O_CREAT | O_TRUNC) || (flags & O_ACCMODE) != O_RDONLY ? "create" : "open";
}

int open(const char *path, int flags, ...)
{
    OPEN_MODE
    CALL(open, int, -1, open_name(flags), AT_FDCWD, path, path, flags, permissions)
}
int open64(const char *path, int flags, ...)
{
    OPEN_MODE
    CALL(open64, int, -1, open_name(flags), AT_FDCWD, path, path, flags, permissions)
}
int openat(int folder, const char *path, int flags, ...)
{
    OPEN_MODE
    CALL(openat, int, -1, open_name(flags), folder, path, folder, path, flags, permissions)
}
int openat64(int folder, const char *path, int flags, ...)
{
    OPEN_MODE
    CALL(openat64, int, -1, open_name(flags), folder, path, folder, path, flags, permissions)
}

/* A descriptor is closed even where closing fails, as on Linux. Closing what was only read does not fail. */
int close(int file)
{
    REAL(close);
    int error = errno, flags = fault.folder[0] ? fcntl(file, F_GETFL) : O_RDONLY;
    errno = error;
    enum mode mode = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY ? reached("close", file, NULL) : COUNT;
    int result = real(file);
    if (mode == KILL_AFTER)
        kill(getpid(), SIGKILL);
    if (mode != FAIL)
        return result;
    errno = fault.error;
    return -1;
}

ssize_t read(int file, void *bytes, size_t size) CALL(read, ssize_t, -1, "read", file, NULL, file, bytes, size)
ssize_t write(int file, const void *bytes, size_t size)
    CALL(write, ssize_t, -1, "write", file, NULL, file, bytes, size)
ssize_t writev(int file, const struct iovec *parts, int num)
    CALL(writev, ssize_t, -1, "write", file, NULL, file, parts, num)
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size)
    CALL(sendfile64, ssize_t, -1, "sendfile", to, NULL, to, from, offset, size)
ssize_t copy_file_range(int from, off64_t *from_offset, int to, off64_t *to_offset, size_t size, unsigned flags)
    CALL(copy_file_range, ssize_t, -1, "copy_file_range", to, NULL, from, from_offset, to, to_offset, size, flags)
int ftruncate64(int file, off64_t size) CALL(ftruncate64, int, -1, "ftruncate", file, NULL, file, size)
int fsync(int file) CALL(fsync, int, -1, "fsync", file, NULL, file)
int fdatasync(int file) CALL(fdatasync, int, -1, "fdatasync", file, NULL, file)
int flock(int file, int operation) CALL(flock, int, -1, "flock", file, NULL, file, operation)
int fchmod(int file, mode_t mode_) CALL(fchmod, int, -1, "chmod", file, NULL, file, mode_)
int chmod(const char *path, mode_t mode_) CALL(chmod, int, -1, "chmod", AT_FDCWD, path, path, mode_)
int fchmodat(int folder, const char *path, mode_t mode_, int flags)
    CALL(fchmodat, int, -1, "chmod", folder, path, folder, path, mode_, flags)
int mkdir(const char *path, mode_t mode_) CALL(mkdir, int, -1, "mkdir", AT_FDCWD, path, path, mode_)
int mkdirat(int folder, const char *path, mode_t mode_)
    CALL(mkdirat, int, -1, "mkdir", folder, path, folder, path, mode_)
int rmdir(const char *path) CALL(rmdir, int, -1, "rmdir", AT_FDCWD, path, path)
int unlink(const char *path) CALL(unlink, int, -1, "unlink", AT_FDCWD, path, path)
int unlinkat(int folder, const char *path, int flags)
    CALL(unlinkat, int, -1, flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, path, folder, path, flags)
int rename(const char *from, const char *to) CALL(rename, int, -1, "rename", AT_FDCWD, to, from, to)
int renameat(int folder, const char *from, int to_folder, const char *to)
    CALL(renameat, int, -1, "rename", to_folder, to, folder, from, to_folder, to)
int link(const char *from, const char *to) CALL(link, int, -1, "link", AT_FDCWD, to, from, to)
int linkat(int folder, const char *from, int to_folder, const char *to, int flags)
    CALL(linkat, int, -1, "link", to_folder, to, folder, from, to_folder, to, flags)
int stat64(const char *path, struct stat64 *facts) CALL(stat64, int, -1, "stat", AT_FDCWD, path, path, facts)
int lstat64(const char *path, struct stat64 *facts) CALL(lstat64, int, -1, "stat", AT_FDCWD, path, path, facts)
int fstatat64(int folder, const char *path, struct stat64 *facts, int flags)
    CALL(fstatat64, int, -1, "stat", folder, path, folder, path, facts, flags)
DIR *opendir(const char *path) CALL(opendir, DIR *, NULL, "opendir", AT_FDCWD, path, path)
DIR *fdopendir(int folder) CALL(fdopendir, DIR *, NULL, "opendir", folder, NULL, folder)
