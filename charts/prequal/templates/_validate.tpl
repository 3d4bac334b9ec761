{{- /* Checks that a schema cannot express: values that contradict each other. Reports all errors at once, by name. */ -}}
{{- define "prequal.validate" -}}
{{- $wrong := list -}}
{{- $version := .Capabilities.KubeVersion.Version -}}
{{- with .Values.replicas -}}
  {{- if and .enabled .deployment (not .app.image) -}}
  {{- $wrong = append $wrong "replicas.app.image is missing: set it to your service's image with its tag (or set replicas.deployment=false and replicas.selectorLabels)" -}}
  {{- end -}}
  {{- if and .enabled (not .deployment) (not .selectorLabels) -}}
  {{- $wrong = append $wrong "replicas.selectorLabels is missing: set it to the labels of your pods, because replicas.deployment is false" -}}
  {{- end -}}
  {{- if and .deployment .selectorLabels -}}
  {{- $wrong = append $wrong "replicas.selectorLabels needs replicas.deployment=false: the chart's Deployment has labels of its own" -}}
  {{- end -}}
{{- end -}}
{{- if not .Values.registry -}}
  {{- $needed := and .Values.replicas.enabled .Values.replicas.deployment (not .Values.agent.image.repository) -}}
  {{- $module := get .Values.edge.module .Values.edge.module.from -}}
  {{- if or $needed (and .Values.edge.enabled $module.image (not (dig "image" "repository" "" $module))) -}}
  {{- $wrong = append $wrong "registry is missing: set it to the registry with the release's images, for example ghcr.io/you/prequal (docs/guide/releasing.md)" -}}
  {{- end -}}
{{- end -}}
{{- if eq (int .Values.agent.port) (int .Values.agent.adminPort) -}}
{{- $wrong = append $wrong (printf "agent.adminPort: must differ from agent.port (%d)" (int .Values.agent.port)) -}}
{{- end -}}
{{- if has (int .Values.agent.appPort) (list (int .Values.agent.port) (int .Values.agent.adminPort)) -}}
{{- $wrong = append $wrong (printf "agent.appPort: %d is a port of the agent; the application must listen on another one, on loopback" (int .Values.agent.appPort)) -}}
{{- end -}}
{{- with .Values.agent -}}
  {{- if and (ne .orca.for "all") (not .orca.format) -}}
  {{- $wrong = append $wrong (printf "agent.orca.format is missing: agent.orca.for (%s) has no effect without it" .orca.for) -}}
  {{- end -}}
  {{- $orca := include "prequal.agent.orca" . | fromYaml -}}
  {{- range .args -}}
    {{- $flag := first (splitList "=" .) -}}
    {{- if hasKey $orca $flag -}}
    {{- $wrong = append $wrong (printf "agent.args: agent.orca already sets %s" $flag) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- with .Values.edge -}}
  {{- if and .enabled (not $.Values.replicas.enabled) (not .upstream.host) (not .config) -}}
  {{- $wrong = append $wrong "edge.upstream.host is missing: set it to a name that resolves to every replica, because replicas.enabled is false" -}}
  {{- end -}}
  {{- if and .enabled (has .module.from (list "imageVolume" "native")) (semverCompare "<1.33-0" $version) -}}
  {{- $wrong = append $wrong (printf "edge.module.from: %s needs Kubernetes 1.33, this is %s; use initContainer or configMap" .module.from $version) -}}
  {{- end -}}
  {{- range $key := list "cluster" "probe_cluster" -}}
    {{- if hasKey $.Values.edge.settings $key -}}
    {{- $wrong = append $wrong (printf "edge.settings.%s: the chart sets it; remove it" $key) -}}
    {{- end -}}
  {{- end -}}
  {{- $memory := dig "limits" "memory" "" .resources | toString -}}
  {{- $unit := dict "Mi" 1048576 "Gi" 1073741824 -}}
  {{- if and .enabled (regexMatch "^[0-9]+(Mi|Gi)$" $memory) -}}
    {{- $bytes := mul (regexFind "^[0-9]+" $memory | int64) (get $unit (regexFind "(Mi|Gi)$" $memory)) -}}
    {{- if ge (int64 .maxHeapBytes) (int64 $bytes) -}}
    {{- $wrong = append $wrong (printf "edge.maxHeapBytes: %d must be less than edge.resources.limits.memory (%s)" (int64 .maxHeapBytes) $memory) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.replicas.enabled (not .Values.edge.enabled) (not .Values.networkPolicy.agentClients) -}}
{{- $wrong = append $wrong "networkPolicy.agentClients is missing: with edge.enabled=false no client could reach the replicas" -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "prequal: %s" (join "; " $wrong)) -}}
{{- end -}}
{{- end -}}
