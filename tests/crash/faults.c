/* Loaded before the C library, lets a file system call fail or kill its process at a chosen moment.

   FAULT_CALL   pwrite, fsync, rename or unlink: the call to disturb
   FAULT_PATH   shell pattern of the file's full path (of a rename, where it goes)
   FAULT_DO     an errno, or "kill"
   FAULT_AFTER  a pwrite is disturbed once this many bytes of the file are written; 0 is at once */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int concerns(const char *call, const char *path)
{
    const char *wanted = getenv("FAULT_CALL"), *pattern = getenv("FAULT_PATH");
    return wanted && pattern && path && strcmp(call, wanted) == 0 && fnmatch(pattern, path, 0) == 0;
}

static int concerns_descriptor(const char *call, int descriptor)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = '\0';
    return concerns(call, path);
}

static int disturb(void)
{
    const char *what = getenv("FAULT_DO");
    if (strcmp(what, "kill") == 0)
        kill(getpid(), SIGKILL);
    errno = atoi(what);
    return -1;
}

#define REAL(name, type) ((type)dlsym(RTLD_NEXT, name))

static ssize_t write_some(const char *name, int descriptor, const void *data, size_t count, off_t offset)
{
    typedef ssize_t (*call)(int, const void *, size_t, off_t);
    if (concerns_descriptor("pwrite", descriptor)) {
        off_t limit = getenv("FAULT_AFTER") ? atoll(getenv("FAULT_AFTER")) : 0;
        if (offset >= limit)
            return disturb();
        if (offset + (off_t)count > limit)
            count = limit - offset;
    }
    return REAL(name, call)(descriptor, data, count, offset);
}

ssize_t pwrite(int descriptor, const void *data, size_t count, off_t offset)
{
    return write_some("pwrite", descriptor, data, count, offset);
}

ssize_t pwrite64(int descriptor, const void *data, size_t count, off_t offset)
{
    return write_some("pwrite64", descriptor, data, count, offset);
}

int fsync(int descriptor)
{
    return concerns_descriptor("fsync", descriptor) ? disturb() : REAL("fsync", int (*)(int))(descriptor);
}

int rename(const char *from, const char *to)
{
    return concerns("rename", to) ? disturb() : REAL("rename", int (*)(const char *, const char *))(from, to);
}

int unlink(const char *path)
{
    return concerns("unlink", path) ? disturb() : REAL("unlink", int (*)(const char *))(path);
}
