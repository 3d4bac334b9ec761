// Loads the native module as Envoy does, creates a policy and asks it for a host once. `loader.rs` adds an empty function
// for every other function of Envoy that the module calls.
//
// It prints what happened, one fact a line. The cluster has no hosts, so the policy finds none.

#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct buffer {
  const char *data;
  size_t length;
};

static struct buffer of(const char *text) { return (struct buffer){text, strlen(text)}; }

void envoy_dynamic_module_callback_log(uint32_t level, struct buffer message) {
  printf("log %u: %.*s\n", level, (int)message.length, message.data);
}

void envoy_dynamic_module_callback_lb_get_cluster_name(void *lb, struct buffer *name) { *name = of("replicas"); }

// Every request asks the module of the crash test to panic.
bool envoy_dynamic_module_callback_lb_context_get_downstream_header(void *context, struct buffer name,
                                                                    struct buffer *value, size_t index,
                                                                    size_t *count) {
  *value = of("1");
  return true;
}

static void *hook(void *module, const char *name) {
  void *found = dlsym(module, name);
  if (!found) printf("no hook %s\n", name);
  return found;
}

int main(int argc, char **argv) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (argc != 2) return 2;
  void *module = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!module) {
    printf("not loaded: %s\n", dlerror());
    return 1;
  }
  const char *(*init)(void) = hook(module, "envoy_dynamic_module_on_program_init");
  void *(*config_new)(void *, struct buffer, struct buffer) = hook(module, "envoy_dynamic_module_on_lb_config_new");
  void *(*lb_new)(void *, void *) = hook(module, "envoy_dynamic_module_on_lb_new");
  bool (*choose)(void *, void *, void *, uint32_t *, uint32_t *) =
      hook(module, "envoy_dynamic_module_on_lb_choose_host");
  if (!init || !config_new || !lb_new || !choose) return 1;
  printf("version %s\n", init());

  int envoy;  // what Envoy's pointers point to; the module does not look into it
  const char *settings = "{\"clusters\": [{\"cluster\": \"replicas\", \"probe_cluster\": \"replicas-agent\"}]}";
  void *config = config_new(&envoy, of("prequal"), of(settings));
  void *policy = config ? lb_new(config, &envoy) : NULL;
  printf("policy %s\n", policy ? "created" : "refused");
  if (!policy) return 1;
  uint32_t priority = 0, healthy = 0;
  printf("host %s\n", choose(&envoy, policy, &envoy, &priority, &healthy) ? "chosen" : "none");
  return 0;
}
