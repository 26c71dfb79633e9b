/* Preloaded: the wall clock of a process is AHEAD seconds ahead. Others of its clocks, the kernel's
   and the times of files are as for everybody. What it waits for until an hour of its own clock is
   waited for until that moment. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t ahead(void) {
  static time_t seconds = -1;
  if (seconds == -1) {
    const char *told = getenv("AHEAD");
    seconds = told ? atol(told) : 0;
  }
  return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  long failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
  return (int)failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  (void)zone;
  struct timespec own;
  if (clock_gettime(CLOCK_REALTIME, &own)) return -1;
  now->tv_sec = own.tv_sec;
  now->tv_usec = own.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec own;
  clock_gettime(CLOCK_REALTIME, &own);
  if (now) *now = own.tv_sec;
  return own.tv_sec;
}

/* A time on the wall clock as the kernel has it; one since the machine's start is left alone. */
static struct timespec of_kernel(const struct timespec *until) {
  struct timespec own = *until;
  if (own.tv_sec > 1000000000) own.tv_sec -= ahead();
  return own;
}

static void *next(const char *name, const char *version) {
  void *found = dlvsym(RTLD_NEXT, name, version);
  return found ? found : dlsym(RTLD_NEXT, name);
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
  static int (*own)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!own) own = next("pthread_cond_timedwait", "GLIBC_2.3.2");
  struct timespec moment = of_kernel(until);
  return own(cond, mutex, &moment);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
  static int (*own)(sem_t *, const struct timespec *);
  if (!own) own = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec moment = of_kernel(until);
  return own(semaphore, &moment);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
  static int (*own)(pthread_mutex_t *, const struct timespec *);
  if (!own) own = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
  struct timespec moment = of_kernel(until);
  return own(mutex, &moment);
}
