// Runs the native module in place of Envoy, with many hosts or with hosts that change all the time. `loader.rs` adds an
// empty function for every other function of Envoy that the module calls.
//
//   hosts MODULE attempts HOSTS COUNT   prints the CPU time of an attempt, ns, and the share of picks by load, per cent
//   hosts MODULE updates HOSTS COUNT    prints the CPU time of an update on both threads, µs, and the heap, bytes: before
//                                       the updates, and the largest size in each half of them
//
// There are two threads, as in an Envoy with one worker. They never run at the same time.

#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { UNIVERSE = 10000, FLIGHTS = 32, MAX_PROBES = 1024, TICK = 2000, COUNTERS = 256, READINGS = 200 };

struct buffer {
  const char *data;
  size_t length;
};

struct header {
  struct buffer name, value;
};

struct host {
  char text[24];
  struct buffer address;
  unsigned in_flight;
};

// An attempt. Its address also serves as the pointer to Envoy's filter object, which the module passes back in calls.
struct attempt {
  void *filter;
  struct host *host;
  char report[96];
};

struct probe {
  uint64_t number;
  char host[24];
};

static struct host universe[UNIVERSE], *hosts[UNIVERSE];
static size_t host_count;
static struct probe probes[MAX_PROBES];
static size_t probe_count;
static bool woken;
static char *counter_names[COUNTERS];
static uint64_t counters[COUNTERS];
static size_t counter_count;

static struct buffer of(const char *text) { return (struct buffer){text, strlen(text)}; }

static bool is(struct buffer one, const char *other) {
  return one.length == strlen(other) && memcmp(one.data, other, one.length) == 0;
}

static void fail(const char *why) {
  printf("%s\n", why);
  exit(1);
}

static void report(char *text, size_t size, unsigned rif, const char *host) {
  snprintf(text, size, "%u;%u;%s;base=4000;knee=8", rif, 4000 + 500 * rif, host);
}

// ---- what Envoy provides ----

void envoy_dynamic_module_callback_log(uint32_t level, struct buffer message) {
  printf("log %u: %.*s\n", level, (int)message.length, message.data);
}

void envoy_dynamic_module_callback_lb_get_cluster_name(void *lb, struct buffer *name) { *name = of("replicas"); }

size_t envoy_dynamic_module_callback_lb_get_priority_set_size(void *lb) { return 1; }

size_t envoy_dynamic_module_callback_lb_get_hosts_count(void *lb, uint32_t priority) { return host_count; }

bool envoy_dynamic_module_callback_lb_get_host_address(void *lb, uint32_t priority, size_t index,
                                                       struct buffer *address) {
  if (index >= host_count) return false;
  *address = hosts[index]->address;
  return true;
}

bool envoy_dynamic_module_callback_lb_get_healthy_host_address(void *lb, uint32_t priority, size_t index,
                                                               struct buffer *address) {
  return envoy_dynamic_module_callback_lb_get_host_address(lb, priority, index, address);
}

uint32_t envoy_dynamic_module_callback_lb_get_host_weight(void *lb, uint32_t priority, size_t index) { return 1; }

uint64_t envoy_dynamic_module_callback_lb_get_host_stat(void *lb, uint32_t priority, size_t index, uint32_t stat) {
  return index < host_count ? hosts[index]->in_flight : 0;
}

uint32_t envoy_dynamic_module_callback_lb_config_define_counter(void *config, struct buffer name,
                                                                struct buffer *labels, size_t label_count,
                                                                size_t *id) {
  if (counter_count == COUNTERS) return 1;
  counter_names[counter_count] = strndup(name.data, name.length);
  *id = counter_count++;
  return 0;
}

uint32_t envoy_dynamic_module_callback_lb_config_increment_counter(void *config, size_t id, struct buffer *labels,
                                                                   size_t label_count, uint64_t value) {
  counters[id] += value;
  return 0;
}

void *envoy_dynamic_module_callback_bootstrap_extension_config_scheduler_new(void *config) { return &woken; }

void envoy_dynamic_module_callback_bootstrap_extension_config_scheduler_commit(void *scheduler, uint64_t event) {
  woken = true;
}

uint32_t envoy_dynamic_module_callback_bootstrap_extension_http_callout(void *config, uint64_t *number,
                                                                        struct buffer cluster, struct header *headers,
                                                                        size_t header_count, struct buffer body,
                                                                        uint64_t timeout_ms) {
  static uint64_t next;
  if (probe_count == MAX_PROBES) return 1;
  struct probe *probe = &probes[probe_count++];
  probe->number = *number = ++next;
  for (size_t index = 0; index < header_count; index++) {
    struct buffer value = headers[index].value;
    if (is(headers[index].name, "x-prequal-dest") && value.length < sizeof probe->host) {
      memcpy(probe->host, value.data, value.length);
      probe->host[value.length] = 0;
    }
  }
  return 0;
}

bool envoy_dynamic_module_callback_http_get_cluster_name(void *filter, struct buffer *name) {
  *name = of("replicas");
  return true;
}

size_t envoy_dynamic_module_callback_http_get_headers_size(void *filter, uint32_t kind) { return 2; }

bool envoy_dynamic_module_callback_http_get_headers(void *filter, uint32_t kind, struct header *headers) {
  struct attempt *attempt = filter;
  headers[0] = (struct header){of(":status"), of("200")};
  headers[1] = (struct header){of("x-prequal-load"), of(attempt->report)};
  return true;
}

bool envoy_dynamic_module_callback_access_logger_get_upstream_cluster(void *log, struct buffer *name) {
  *name = of("replicas");
  return true;
}

// ---- what the module provides ----

static void *module, *extension, *config, *main_policy, *policy, *filters, *logger;
static void *(*config_new)(void *, struct buffer, struct buffer);
static void *(*lb_new)(void *, void *);
static void (*hosts_changed)(void *, void *, size_t, size_t);
static bool (*choose)(void *, void *, void *, uint32_t *, uint32_t *);
static void (*scheduled)(void *, void *, uint64_t), (*timer_fired)(void *, void *, void *);
static void (*replied)(void *, void *, uint64_t, uint32_t, struct header *, size_t, struct buffer *, size_t);
static void *(*filter_new)(void *, void *);
static uint32_t (*request_headers)(void *, void *, bool), (*response_headers)(void *, void *, bool);
static void (*filter_destroy)(void *), (*logged)(void *, void *, uint32_t);

static void *hook(const char *name) {
  char full[128];
  snprintf(full, sizeof full, "envoy_dynamic_module_on_%s", name);
  void *found = dlsym(module, full);
  if (!found) fail(full);
  return found;
}

// What Envoy's pointers point to; the module does not look into it.
static int envoy;

// ---- the main thread ----

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static void (*task)(void);

static void *main_thread(void *unused) {
  pthread_mutex_lock(&mutex);
  for (;;) {
    while (!task) pthread_cond_wait(&changed, &mutex);
    task();
    task = NULL;
    pthread_cond_broadcast(&changed);
  }
  return NULL;
}

static void on_main(void (*run)(void)) {
  pthread_mutex_lock(&mutex);
  task = run;
  pthread_cond_broadcast(&changed);
  while (task) pthread_cond_wait(&changed, &mutex);
  pthread_mutex_unlock(&mutex);
}

static void start(void) {
  extension = ((void *(*)(void *, struct buffer, struct buffer))hook("bootstrap_extension_config_new"))(
      &envoy, of("prequal"), of(""));
  config = config_new(&envoy, of("prequal"),
                      of("{\"clusters\": [{\"cluster\": \"replicas\", \"probe_cluster\": \"replicas-agent\"}]}"));
  if (!extension || !config) fail("a configuration was refused");
  main_policy = lb_new(config, &envoy);
}

static void serve(void) {
  woken = false;
  scheduled(&envoy, extension, 0);
  char text[96];
  for (size_t index = 0; index < probe_count; index++) {
    report(text, sizeof text, rand() % 8, probes[index].host);
    struct header headers[] = {{of(":status"), of("200")}, {of("x-prequal-load"), of(text)}};
    replied(&envoy, extension, probes[index].number, 0, headers, 2, NULL, 0);
  }
  probe_count = 0;
}

static void tick(void) {
  timer_fired(&envoy, extension, NULL);
  serve();
}

static double cpu(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec / 1e9;
}

static double main_seconds;

static void update_main(void) {
  double began = cpu();
  hosts_changed(&envoy, main_policy, 1, 1);
  if (woken) serve();
  main_seconds += cpu() - began;
}

// ---- the worker ----

// The requests that are waiting for their responses, a ring.
static struct attempt flights[FLIGHTS];

// Ends the oldest attempt and begins another. Returns false if there is no host.
static bool attempt(size_t turn) {
  struct attempt *attempt = &flights[turn % FLIGHTS];
  if (attempt->filter) {
    attempt->host->in_flight--;
    report(attempt->report, sizeof attempt->report, attempt->host->in_flight, attempt->host->text);
    response_headers(attempt, attempt->filter, true);
    filter_destroy(attempt->filter);
    logged(attempt, logger, 9);
    attempt->filter = NULL;
  }
  uint32_t priority = 9, index = 0;
  if (!choose(&envoy, policy, &envoy, &priority, &index)) return false;
  if (priority != 0 || index >= host_count) fail("a host that does not exist");
  attempt->host = hosts[index];
  attempt->host->in_flight++;
  attempt->filter = filter_new(filters, attempt);
  request_headers(attempt, attempt->filter, true);
  return true;
}

static double attempts(size_t count) {
  double seconds = 0;
  for (size_t turn = 0; turn < count;) {
    double began = cpu();
    for (size_t end = turn + TICK; turn < end; turn++)
      if (!attempt(turn)) fail("no host");
    seconds += cpu() - began;
    on_main(tick);
  }
  return seconds / count;
}

// Announces the hosts from `first` on, on both threads; returns the time that the worker took.
static double update(size_t first, size_t count) {
  host_count = count;
  for (size_t index = 0; index < count; index++) hosts[index] = &universe[(first + index) % UNIVERSE];
  on_main(update_main);
  double began = cpu();
  hosts_changed(&envoy, policy, 1, 1);
  return cpu() - began;
}

// Size of the heap with the first `count` hosts.
static size_t heap(size_t count) {
  update(0, count);
  on_main(tick);
  attempt(0);
  struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

static double steered(void) {
  uint64_t all = 0, fallback = 0;
  for (size_t id = 0; id < counter_count; id++) {
    if (!strstr(counter_names[id], "picks_total")) continue;
    all += counters[id];
    if (strstr(counter_names[id], "branch=fallback")) fallback += counters[id];
  }
  return all ? 100.0 * (all - fallback) / all : 0;
}

static void updates(size_t most, size_t count) {
  size_t before = heap(1), largest[2] = {0, 0};
  main_seconds = 0;
  double worker_seconds = 0;
  for (size_t number = 1; number <= count; number++) {
    // Half of the hosts to all of them; none now and then.
    size_t size = number % 1000 == 0 ? 0 : most - rand() % (most / 2 + 1);
    worker_seconds += update(rand() % UNIVERSE, size);
    if (attempt(number) != (size > 0)) fail("a host although there is none, or none although there is one");
    if (number % 100 == 0) on_main(tick);
    // The module's tables double and shrink again, so the size of a moment says little.
    if (number % (count / READINGS) == 0) {
      double seconds = main_seconds;
      size_t size = heap(most), *half = &largest[number > count / 2];
      main_seconds = seconds;
      if (size > *half) *half = size;
    }
  }
  printf("%.2f %.2f %zu %zu %zu\n", main_seconds / count * 1e6, worker_seconds / count * 1e6, before, largest[0],
         largest[1]);
}

int main(int argc, char **argv) {
  if (argc != 5) return 2;
  setvbuf(stdout, NULL, _IOLBF, 0);
  // The heap's statistics are those of the first arena.
  mallopt(M_ARENA_MAX, 1);
  srand(1);
  size_t most = strtoul(argv[3], NULL, 10), count = strtoul(argv[4], NULL, 10);
  if (most < 1 || most > UNIVERSE || count < READINGS) return 2;
  module = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!module) fail(dlerror());
  config_new = hook("lb_config_new");
  lb_new = hook("lb_new");
  hosts_changed = hook("lb_on_host_membership_update");
  choose = hook("lb_choose_host");
  scheduled = hook("bootstrap_extension_config_scheduled");
  timer_fired = hook("bootstrap_extension_timer_fired");
  replied = hook("bootstrap_extension_http_callout_done");
  filter_new = hook("http_filter_new");
  request_headers = hook("http_filter_request_headers");
  response_headers = hook("http_filter_response_headers");
  filter_destroy = hook("http_filter_destroy");
  logged = hook("access_logger_log");
  for (size_t index = 0; index < UNIVERSE; index++) {
    struct host *host = &universe[index];
    snprintf(host->text, sizeof host->text, "10.0.%zu.%zu:8080", index / 250, index % 250 + 1);
    host->address = of(host->text);
  }
  pthread_t thread;
  pthread_create(&thread, NULL, main_thread, NULL);
  on_main(start);
  policy = lb_new(config, &envoy);
  void *(*extra)(void *, struct buffer, struct buffer) = hook("http_filter_config_new");
  filters = extra(&envoy, of("prequal"), of(""));
  extra = hook("access_logger_config_new");
  void *(*logger_new)(void *, void *) = hook("access_logger_new");
  logger = logger_new(extra(&envoy, of(""), of("")), &envoy);

  if (strcmp(argv[2], "updates") == 0) {
    updates(most, count);
  } else {
    update(0, most);
    attempts(20 * TICK);
    double seconds = attempts(count);
    printf("%.0f %.1f\n", seconds * 1e9, steered());
  }
  // The main thread still waits for tasks.
  _exit(0);
}
