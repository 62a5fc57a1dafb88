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

{{/* "true" where connections are TLS; fails where nobody chose. */}}
{{- define "handrail.secured" -}}
{{- if not .Values.tls.mode }}
{{- fail "tls.mode must be chosen: certManager (and tls.issuer.name), secret (and your secrets), or plaintext where something else protects the network; see docs/security.md" }}
{{- end }}
{{- if and (eq .Values.tls.mode "certManager") (not .Values.tls.issuer.name) }}
{{- fail "tls.mode certManager needs tls.issuer.name: the Issuer or ClusterIssuer that signs" }}
{{- end }}
{{- if ne .Values.tls.mode "plaintext" }}true{{ end }}
{{- end }}

{{/* The secret of a part: dict root, part (collector | sidecar). */}}
{{- define "handrail.secret" -}}
{{- index .root.Values.tls (printf "%sSecret" .part) | default (printf "%s-%s-tls" (include "handrail.name" .root) .part) }}
{{- end }}

{{/* A volume handrail-tls with certificate, key, authority and token of a part; empty where there are none. */}}
{{- define "handrail.tlsVolume" -}}
{{- if or (include "handrail.secured" .root) .root.Values.auth.secret }}
- name: handrail-tls
  projected:
    defaultMode: 0440
    sources:
      {{- if include "handrail.secured" .root }}
      - secret: {name: {{ include "handrail.secret" . }}}
      {{- end }}
      {{- with .root.Values.auth.secret }}
      - secret: {name: {{ . }}, items: [{key: token, path: token}]}
      {{- end }}
{{- end }}
{{- end }}

{{- define "handrail.tlsMount" -}}
{{- if or (include "handrail.secured" .) .Values.auth.secret }}
- {name: handrail-tls, mountPath: /etc/handrail-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "handrail.scheme" -}}
{{ ternary "HTTPS" "HTTP" (eq (include "handrail.secured" .) "true") }}
{{- end }}

{{/* Where sidecars send to. */}}
{{- define "handrail.endpoint" -}}
{{ lower (include "handrail.scheme" .) }}://{{ include "handrail.name" . }}-collector.{{ .Release.Namespace }}.svc:4318
{{- end }}

{{/* Fails where the bound of the store and the journal are known not to fit into the volume; only GiB and TiB are compared. */}}
{{- define "handrail.storageFits" -}}
{{- $size := .Values.collector.storage.size }}
{{- $config := .Values.collector.config }}
{{- $store := dig "store" "max_bytes" "" $config | toString }}
{{- $journal := dig "journal_max_bytes" "4GiB" $config | toString }}
{{- $gib := dict }}
{{- range $each := list $size $store $journal }}
{{- if regexMatch "^[0-9]+(Gi|GiB|Ti|TiB)$" $each }}
{{- $_ := set $gib $each (mul (regexFind "[0-9]+" $each | int) (ternary 1024 1 (contains "Ti" $each))) }}
{{- end }}
{{- end }}
{{- if and (hasKey $gib $size) (hasKey $gib $store) (hasKey $gib $journal) }}
{{- if gt (add (get $gib $store) (get $gib $journal)) (get $gib $size) }}
{{- fail (printf "collector.config.store.max_bytes (%s) and the journal (%s) do not fit into collector.storage.size (%s): lower max_bytes or raise size" $store $journal $size) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The collector's configuration file. */}}
{{- define "handrail.collectorConfig" -}}
{{- include "handrail.storageFits" . -}}
{{- $own := dict "otlp_grpc" "0.0.0.0:4317" "otlp_http" "0.0.0.0:4318" "api" "0.0.0.0:4380" "data" "/var/lib/handrail/data" -}}
{{- if include "handrail.secured" . }}
{{- $tls := dict "cert_file" "/etc/handrail-tls/tls.crt" "key_file" "/etc/handrail-tls/tls.key" }}
{{- if .Values.tls.clientCertificates }}{{ $_ := set $tls "client_ca_file" "/etc/handrail-tls/ca.crt" }}{{ end }}
{{- $_ := set $own "tls" $tls }}
{{- else }}
{{- $_ := set $own "plaintext" (list "otlp_grpc" "otlp_http" "api") }}
{{- end }}
{{- if .Values.auth.secret }}{{ $_ := set $own "auth" (dict "token_file" "/etc/handrail-tls/token") }}{{ end -}}
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
