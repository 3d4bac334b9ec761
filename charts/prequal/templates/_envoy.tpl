{{- /*
The Envoy configuration: files/envoy.yaml, which links to envoy-configs/kubernetes/base/envoy.yaml, with replacements from
the values. The native module has files/envoy-native.yaml, which links to overlays/native/envoy.yaml. If a text to be
replaced is missing, rendering fails, so that the chart cannot miss a change to that file.
*/ -}}
{{- define "prequal.envoy" -}}
{{- if .Values.edge.config -}}
{{- .Values.edge.config -}}
{{- else -}}
{{- $edge := .Values.edge -}}
{{- $host := $edge.upstream.host -}}
{{- $port := $edge.upstream.port -}}
{{- if not $host -}}
{{- $host = printf "%s.%s.svc.%s." (include "prequal.name" (list . "replicas")) .Release.Namespace .Values.clusterDomain -}}
{{- $port = .Values.agent.port -}}
{{- end -}}
{{- $changes := list
      (list "address: replicas.prequal.svc.cluster.local.," (printf "address: %s," (toJson $host)))
      (list "port_value: 8080}" (printf "port_value: %d}" (int $port)))
      (list "max_heap_size_bytes: 335544320" (printf "max_heap_size_bytes: %d" (int64 $edge.maxHeapBytes)))
      (list "max_active_downstream_connections: 5000" (printf "max_active_downstream_connections: %d" (int $edge.maxConnections)))
-}}
{{- $file := "files/envoy-native.yaml" -}}
{{- if ne $edge.module.from "native" -}}
{{- $file = "files/envoy.yaml" -}}
{{- $module := get (get $edge.module $edge.module.from) "file" -}}
{{- $changes = append $changes (list "filename: /var/lib/prequal/prequal_filter.wasm" (printf "filename: /var/lib/prequal/%s" $module)) -}}
{{- end -}}
{{- if $edge.settings -}}
{{- $shipped := "{\"cluster\": \"replicas\", \"probe_cluster\": \"replicas-agent\", \"verified_probes\": true}" -}}
{{- $changes = append $changes (list $shipped (mergeOverwrite (fromJson $shipped) $edge.settings | toJson)) -}}
{{- end -}}
{{- $text := .Files.Get $file -}}
{{- range $changes -}}
  {{- if not (contains (first .) $text) -}}
  {{- fail (printf "%s has no `%s` to replace" $file (first .)) -}}
  {{- end -}}
  {{- $text = replace (first .) (last .) $text -}}
{{- end -}}
{{- $text -}}
{{- end -}}
{{- end -}}
