/* Loaded before libc: stops or kills its process at an exact point of a data connection.
 *
 * `fault_arm(where, signal, nbytes)` makes it ready. It fires once.
 *   LANDING  when so many bytes have been received
 *   ACK      before the next reply is sent: all bytes are in place, and nobody is told
 *   REPLY    when so many bytes of the next reply are sent
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { NOWHERE, LANDING, ACK, REPLY };
#define REPLY_BYTES 24

static volatile int armed = NOWHERE, chosen;
static volatile long left;

void fault_arm(int where, int signal, long nbytes)
{
    chosen = signal;
    left = nbytes;
    armed = where;
}

static void fire(void)
{
    armed = NOWHERE;
    raise(chosen); /* to this thread: it takes no further step */
}

static void *real(const char *name)
{
    return dlsym(RTLD_NEXT, name);
}

static ssize_t received(ssize_t got)
{
    if (armed == LANDING && got > 0 && __atomic_sub_fetch(&left, got, __ATOMIC_SEQ_CST) <= 0)
        fire();
    return got;
}

ssize_t recv(int fd, void *buffer, size_t size, int flags)
{
    ssize_t (*call)(int, void *, size_t, int) = real("recv");
    return received(call(fd, buffer, size, flags));
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    ssize_t (*call)(int, struct msghdr *, int) = real("recvmsg");
    return received(call(fd, message, flags));
}

static int is_reply(const struct msghdr *message)
{
    return message->msg_iovlen && message->msg_iov[0].iov_len >= REPLY_BYTES &&
           message->msg_iov[0].iov_len % REPLY_BYTES == 0 &&
           memcmp(message->msg_iov[0].iov_base, "\x54\x4d", 2) == 0;
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    ssize_t (*call)(int, const struct msghdr *, int) = real("sendmsg");
    if (armed == ACK && is_reply(message))
        fire();
    if (armed != REPLY || !is_reply(message))
        return call(fd, message, flags);
    struct iovec parts[2] = {message->msg_iov[0]};
    size_t n = 1;
    if (message->msg_iovlen > 1) {
        parts[n] = message->msg_iov[1];
        if (parts[n].iov_len > (size_t)left)
            parts[n].iov_len = (size_t)left;
        n++;
    }
    struct msghdr cut = {.msg_iov = parts, .msg_iovlen = n};
    ssize_t sent = call(fd, &cut, flags);
    fire();
    return sent;
}
