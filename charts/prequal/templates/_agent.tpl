{{- /*
prequal.inject adds the agent to a Deployment or a StatefulSet, and prints the result. Use it in a chart that depends on
this one:

  {{ include "prequal.inject" (dict "context" . "values" .Values.prequal "deployment" (include "shop.deployment" .)) }}

It adds the agent's container and the annotations by which Prometheus finds it. It also adds the sleep and the grace
period that let requests end, unless the application has its own. docs/guide/kubernetes.md has an example.
*/ -}}
{{- define "prequal.inject" -}}
{{- $agent := .values.agent -}}
{{- $object := fromYaml .deployment -}}
{{- if hasKey $object "Error" -}}
{{- fail (printf "prequal.inject: the deployment is not YAML: %s" $object.Error) -}}
{{- end -}}
{{- $template := dig "spec" "template" dict $object -}}
{{- $pod := dig "spec" dict $template -}}
{{- $containers := dig "containers" list $pod -}}
{{- if not $containers -}}
{{- fail "prequal.inject: the deployment has no spec.template.spec.containers" -}}
{{- end -}}

{{- $app := first $containers -}}
{{- if $agent.container -}}
  {{- $app = dict -}}
  {{- range $containers -}}{{- if eq .name $agent.container -}}{{- $app = . -}}{{- end -}}{{- end -}}
  {{- if not $app -}}
  {{- fail (printf "agent.container: the deployment has no container `%s`" $agent.container) -}}
  {{- end -}}
{{- end -}}
{{- range $containers -}}
  {{- if eq .name "probe-agent" -}}
  {{- fail "prequal.inject: the deployment already has a container `probe-agent`" -}}
  {{- end -}}
  {{- $name := .name -}}
  {{- range .ports -}}
    {{- if has .name (list "http" "http-metrics") -}}
    {{- fail (printf "prequal.inject: container `%s` has a port named `%s`, which is the name of the agent's port: rename it or leave it out" $name .name) -}}
    {{- end -}}
    {{- if has (int .containerPort) (list (int $agent.port) (int $agent.adminPort)) -}}
    {{- fail (printf "agent.port %d, agent.adminPort %d: container `%s` already uses port %d" (int $agent.port) (int $agent.adminPort) $name (int .containerPort)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}

{{- if not (dig "lifecycle" "preStop" dict $app) -}}
{{- $_ := set $app "lifecycle" (merge (dict "preStop" (fromYaml (include "prequal.sleep" .))) (dig "lifecycle" dict $app)) -}}
{{- end -}}
{{- $sleep := int (dig "lifecycle" "preStop" "sleep" "seconds" $agent.appSleepSeconds $app) -}}
{{- $drain := add (include "prequal.agent.drainDelayMs" .values | int) $agent.drainTimeoutMs -}}
{{- if lt (mul $sleep 1000) $drain -}}
{{- fail (printf "agent.appSleepSeconds: the application ends after %d s, before agent.drainDelayMs and agent.drainTimeoutMs (%d ms) have passed" $sleep $drain) -}}
{{- end -}}
{{- if not (hasKey $pod "terminationGracePeriodSeconds") -}}
{{- $_ := set $pod "terminationGracePeriodSeconds" (add $sleep 15) -}}
{{- end -}}
{{- if le (int $pod.terminationGracePeriodSeconds) $sleep -}}
{{- fail (printf "terminationGracePeriodSeconds: the pod is killed after %d s, while the application still sleeps (agent.appSleepSeconds: %d s)" (int $pod.terminationGracePeriodSeconds) $sleep) -}}
{{- end -}}

{{- $container := fromYaml (include "prequal.agent.container" .) -}}
{{- if eq $agent.mode "native" -}}
{{- $_ := set $pod "initContainers" (append (dig "initContainers" list $pod) $container) -}}
{{- else -}}
{{- $_ := set $pod "containers" (append $containers $container) -}}
{{- end -}}
{{- $metadata := dig "metadata" dict $template -}}
{{- $annotations := dict "prequal.io/agent-admin" (toString $agent.adminPort) "prequal.io/cluster" "replicas" -}}
{{- $_ := set $metadata "annotations" (merge (dig "annotations" dict $metadata) $annotations) -}}
{{- $_ := set $template "metadata" $metadata -}}
{{- toYaml $object -}}
{{- end -}}

{{- /* The agent's container, for pods written without prequal.inject: (dict "context" . "values" .Values.prequal). */ -}}
{{- define "prequal.agent.container" -}}
{{- $agent := .values.agent -}}
{{- $native := eq $agent.mode "native" -}}
{{- $version := .context.Capabilities.KubeVersion.Version -}}
{{- if and $native (semverCompare "<1.29-0" $version) -}}
{{- fail (printf "agent.mode: native sidecars need Kubernetes 1.29, this is %s; use `container`" $version) -}}
{{- end -}}
{{- $container := fromYaml (include "prequal.agent.shipped" (dict "agent" $agent "native" $native
      "delay" (include "prequal.agent.drainDelayMs" .values)
      "image" (include "prequal.image" (dict "values" .values "image" $agent.image "name" "probe-agent" "value" "agent.image")))) -}}
{{- toYaml (mergeOverwrite $container $agent.extra) -}}
{{- end -}}

{{- define "prequal.agent.shipped" -}}
name: probe-agent
image: {{ .image }}
{{- if .native }}
restartPolicy: Always
{{- end }}
args:
- --listen=0.0.0.0:{{ .agent.port }}
- --upstream=127.0.0.1:{{ .agent.appPort }}
# The address that the Service's name resolves to, with the pod's port.
- --advertise=$(POD_IP):{{ .agent.port }}
- --admin=0.0.0.0:{{ .agent.adminPort }}
- --drain-delay-ms={{ .delay }}
- --drain-timeout-ms={{ int .agent.drainTimeoutMs }}
{{- if ne .agent.readyCheck "tcp" }}
- --ready-check={{ .agent.readyCheck }}
{{- end }}
{{- range $flag, $value := include "prequal.agent.orca" .agent | fromYaml }}
- {{ $flag }}={{ $value }}
{{- end }}
{{- with .agent.args }}
{{ toYaml . }}
{{- end }}
env:
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
ports:
- {name: http, containerPort: {{ .agent.port }}}
- {name: http-metrics, containerPort: {{ .agent.adminPort }}}
# This covers the application too, because the agent checks it.
readinessProbe:
  httpGet: {path: /readyz, port: http-metrics}
  periodSeconds: 2
  timeoutSeconds: 2
# The agent's own port, not /healthz, which fails while it drains.
livenessProbe:
  tcpSocket: {port: http-metrics}
  periodSeconds: 10
resources:
  {{- toYaml .agent.resources | nindent 2 }}
securityContext:
  {{- include "prequal.restricted" . | nindent 2 }}
{{- end -}}

{{- /* The flags that agent.orca sets, with their values. */ -}}
{{- define "prequal.agent.orca" -}}
{{- with .orca -}}
{{- with .format }}
--orca: {{ . }}
{{- end }}
{{- if ne .for "all" }}
--orca-for: {{ .for }}
{{- end }}
{{- with int .limit }}
--orca-limit: {{ . | quote }}
{{- end }}
{{- with int .streams }}
--orca-streams: {{ . | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{- /* A native sidecar gets SIGTERM after the application has ended, so no requests arrive any more. */ -}}
{{- define "prequal.agent.drainDelayMs" -}}
{{- if eq .agent.mode "native" }}0{{ else }}{{ int .agent.drainDelayMs }}{{ end -}}
{{- end -}}

{{- /* The handler `sleep` needs Kubernetes 1.30. Before that, the application's image must contain the program `sleep`. */ -}}
{{- define "prequal.sleep" -}}
{{- if semverCompare ">=1.30-0" .context.Capabilities.KubeVersion.Version -}}
sleep: {seconds: {{ int .values.agent.appSleepSeconds }}}
{{- else -}}
exec: {command: [sleep, {{ .values.agent.appSleepSeconds | int | quote }}]}
{{- end -}}
{{- end -}}
