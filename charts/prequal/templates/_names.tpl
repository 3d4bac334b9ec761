{{- /* Names, labels and images. */ -}}

{{- define "prequal.prefix" -}}
{{- .Values.nameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "prequal.name" -}}
{{- $root := index . 0 -}}
{{- include "prequal.prefix" $root }}-{{ index . 1 -}}
{{- end -}}

{{- /* (list . component): the labels that select pods. They stay the same across upgrades. */ -}}
{{- define "prequal.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: prequal
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- /* (list . component) */ -}}
{{- define "prequal.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "prequal.name" . }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "prequal.labels" . | nindent 2 }}
{{- end -}}

{{- define "prequal.labels" -}}
{{- $root := index . 0 -}}
{{ include "prequal.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* The labels of the replicas' pods, from the chart's Deployment or the user's. */ -}}
{{- define "prequal.replicas.selector" -}}
{{- if .Values.replicas.deployment -}}
{{- include "prequal.selector" (list . "replicas") -}}
{{- else -}}
{{- toYaml .Values.replicas.selectorLabels -}}
{{- end -}}
{{- end -}}

{{- /* (dict "values" <values of the chart> "image" <block of an image> "name" <its name in the registry> "value" <path of the block>) */ -}}
{{- define "prequal.image" -}}
{{- $repository := .image.repository -}}
{{- if not $repository -}}
{{- $why := printf "registry is missing: set it to the registry with the release's images, or set %s.repository" .value -}}
{{- $repository = printf "%s/%s" (required $why .values.registry) .name -}}
{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- $why := printf "%s.tag is missing, and so is %s.digest: an image needs a fixed version" .value .value -}}
{{- printf "%s:%s" $repository (required $why .image.tag | toString) -}}
{{- end -}}
{{- end -}}

{{- define "prequal.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
