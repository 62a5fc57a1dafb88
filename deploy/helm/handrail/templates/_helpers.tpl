{{- define "handrail.name" -}}
{{- if contains "handrail" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-handrail" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "handrail.selector" -}}
app.kubernetes.io/name: handrail
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "handrail.labels" -}}
{{ include "handrail.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* An image by its part: dict root, part (sidecar | collector). */}}
{{- define "handrail.image" -}}
{{- $image := .root.Values.image -}}
{{- $name := printf "%s:%s" (index $image .part) ($image.tag | default .root.Chart.AppVersion) -}}
{{- if $image.registry }}{{ printf "%s/%s" (trimSuffix "/" $image.registry) $name }}{{ else }}{{ $name }}{{ end }}
{{- end }}

{{/* Where sidecars send to. */}}
{{- define "handrail.endpoint" -}}
http://{{ include "handrail.name" . }}-collector.{{ .Release.Namespace }}.svc:4318
{{- end }}

{{/* The collector's configuration file. */}}
{{- define "handrail.collectorConfig" -}}
{{- $own := dict "otlp_grpc" "0.0.0.0:4317" "otlp_http" "0.0.0.0:4318" "api" "0.0.0.0:4380" "data" "/var/lib/handrail/data" -}}
{{- if .Values.collector.forward }}{{ $_ := set $own "forward" .Values.collector.forward }}{{ end -}}
{{- toYaml (mergeOverwrite $own (deepCopy .Values.collector.config)) -}}
{{- end }}

{{- define "handrail.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}
