// A native module with the hooks of Prequal's that does nothing: the cost of any module. Its policy takes hosts in turn.

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

size_t envoy_dynamic_module_callback_lb_get_healthy_hosts_count(void *lb, uint32_t priority);
void envoy_dynamic_module_callback_bootstrap_extension_config_signal_init_complete(void *config);

static int object;

#define HOOK(name) envoy_dynamic_module_on_##name
#define NOTHING(name) void HOOK(name)(void) {}
#define OBJECT(name) void *HOOK(name)(void) { return &object; }
#define CONTINUE(name) uint32_t HOOK(name)(void) { return 0; }

const char *HOOK(program_init)(void) { return "v0.2.0"; }

OBJECT(lb_config_new)
NOTHING(lb_config_destroy)
OBJECT(lb_new)
NOTHING(lb_destroy)
NOTHING(lb_on_host_membership_update)

bool HOOK(lb_choose_host)(void *lb, void *policy, void *context, uint32_t *priority, uint32_t *healthy) {
  static _Thread_local uint32_t turn;
  size_t count = envoy_dynamic_module_callback_lb_get_healthy_hosts_count(lb, 0);
  *priority = 0;
  *healthy = count ? turn++ % count : 0;
  return count > 0;
}

OBJECT(http_filter_config_new)
NOTHING(http_filter_config_destroy)
OBJECT(http_filter_new)
NOTHING(http_filter_destroy)
CONTINUE(http_filter_request_headers)
CONTINUE(http_filter_request_body)
CONTINUE(http_filter_request_trailers)
CONTINUE(http_filter_response_headers)
CONTINUE(http_filter_response_body)
CONTINUE(http_filter_response_trailers)
NOTHING(http_filter_stream_complete)
NOTHING(http_filter_http_callout_done)
NOTHING(http_filter_scheduled)
NOTHING(http_filter_downstream_above_write_buffer_high_watermark)
NOTHING(http_filter_downstream_below_write_buffer_low_watermark)
NOTHING(http_filter_http_stream_headers)
NOTHING(http_filter_http_stream_data)
NOTHING(http_filter_http_stream_trailers)
NOTHING(http_filter_http_stream_complete)
NOTHING(http_filter_http_stream_reset)

OBJECT(access_logger_config_new)
NOTHING(access_logger_config_destroy)
OBJECT(access_logger_new)
NOTHING(access_logger_destroy)
NOTHING(access_logger_log)

void *HOOK(bootstrap_extension_config_new)(void *config) {
  envoy_dynamic_module_callback_bootstrap_extension_config_signal_init_complete(config);
  return &object;
}

NOTHING(bootstrap_extension_config_destroy)
OBJECT(bootstrap_extension_new)
NOTHING(bootstrap_extension_destroy)
NOTHING(bootstrap_extension_server_initialized)
NOTHING(bootstrap_extension_worker_thread_initialized)
NOTHING(bootstrap_extension_drain_started)

void HOOK(bootstrap_extension_shutdown)(void *envoy, void *extension, void (*done)(void *), void *context) {
  done(context);
}

NOTHING(bootstrap_extension_config_scheduled)
NOTHING(bootstrap_extension_timer_fired)
NOTHING(bootstrap_extension_http_callout_done)
NOTHING(bootstrap_extension_file_changed)
CONTINUE(bootstrap_extension_admin_request)
NOTHING(bootstrap_extension_cluster_add_or_update)
NOTHING(bootstrap_extension_cluster_removal)
NOTHING(bootstrap_extension_listener_add_or_update)
NOTHING(bootstrap_extension_listener_removal)
