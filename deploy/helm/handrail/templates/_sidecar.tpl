{{/*
What a pod needs to be observed, as named templates. Each takes a dict:
  root    the chart's context ($)
  role    edge | router | prefill | decode | collocated
  mode    plugin: off the request's path, the engine keeps its port. proxy: inline, the sidecar has the port
  port    the port by which clients or the router know this process
  behind  proxy: the port where the process itself listens then
*/}}

{{/* The list under initContainers. Native sidecars start before the engine and end after it. */}}
{{- define "handrail.initContainers" -}}
{{- $root := .root -}}
{{- $proxy := eq .mode "proxy" -}}
{{- if not $proxy }}
# Brings the plugin to a stock image: the unpacked wheel, no dependencies, into a volume that the engine mounts read-only.
- name: handrail-plugin
  image: {{ include "handrail.image" (dict "root" $root "part" "sidecar") }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [cp, -R, /opt/handrail/plugin/., /handrail-plugin/]
  securityContext: {{- include "handrail.containerSecurity" $root | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: handrail-plugin, mountPath: /handrail-plugin}
{{- end }}
- name: handrail
  image: {{ include "handrail.image" (dict "root" $root "part" "sidecar") }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  restartPolicy: Always
  {{- if not $proxy }}
  # Begins it anew whenever it ends: a container that has ended would make the pod unready, and the engine with it.
  command: [handrail-kept]
  {{- end }}
  args:
    - sidecar
    - --role={{ .role }}
    - --instance=$(POD_IP):{{ .port }}
    {{- if $proxy }}
    - --listen=0.0.0.0:{{ .port }}
    - --upstream=http://127.0.0.1:{{ .behind }}
    {{- else }}
    - --plugin-socket=/run/handrail/engine.sock
    {{- end }}
    {{- if ne .role "edge" }}
    - --metrics-url=http://127.0.0.1:{{ ternary .behind .port $proxy }}
    {{- else }}
    - --new-traces=sampled
    {{- end }}
    - --collector={{ include "handrail.endpoint" $root }}
    {{- with $root.Values.cluster }}
    - --cluster={{ . }}
    {{- end }}
    - --admin=0.0.0.0:9464
    {{- if include "handrail.secured" $root }}
    - --collector-ca-file=/etc/handrail-tls/ca.crt
    {{- if $root.Values.tls.clientCertificates }}
    - --collector-cert-file=/etc/handrail-tls/tls.crt
    - --collector-key-file=/etc/handrail-tls/tls.key
    - --tls-client-ca-file=/etc/handrail-tls/ca.crt
    {{- end }}
    - --tls-cert-file=/etc/handrail-tls/tls.crt
    - --tls-key-file=/etc/handrail-tls/tls.key
    {{- else }}
    - --plaintext=admin
    {{- end }}
    {{- if $root.Values.auth.secret }}
    - --collector-token-file=/etc/handrail-tls/token
    - --auth-token-file=/etc/handrail-tls/token
    {{- end }}
    {{- if $proxy }}
    # As plain as the process behind it was before.
    - --plaintext=proxy
    {{- end }}
    - --spool-dir=/var/lib/handrail/spool
    {{- if ne .role "edge" }}
    {{- if eq $root.Values.sidecar.gpu "none" }}
    - --gpu-sample=off
    {{- else if eq $root.Values.sidecar.gpu "dcgm" }}
    - --gpu-dcgm-url=http://$(HOST_IP):9400/metrics
    {{- end }}
    {{- end }}
    {{- range $root.Values.sidecar.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    {{- if eq $root.Values.sidecar.gpu "dcgm" }}
    - name: HOST_IP
      valueFrom: {fieldRef: {fieldPath: status.hostIP}}
    {{- else if and (eq $root.Values.sidecar.gpu "nvml") (has .role (list "prefill" "decode" "collocated")) }}
    - {name: NVIDIA_VISIBLE_DEVICES, value: all}
    - {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
    {{- end }}
    # In the resource of every span: which pod this was.
    - name: K8S_POD
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: K8S_NODE
      valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
    - name: K8S_NAMESPACE
      valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
    - name: OTEL_RESOURCE_ATTRIBUTES
      value: k8s.pod.name=$(K8S_POD),k8s.node.name=$(K8S_NODE),k8s.namespace.name=$(K8S_NAMESPACE)
  ports:
    - {name: handrail, containerPort: 9464}
    {{- if $proxy }}
    - {name: http, containerPort: {{ .port }}}
    {{- end }}
  {{- if $proxy }}
  livenessProbe:
    httpGet: {path: /healthz, port: handrail, scheme: {{ include "handrail.scheme" $root }}}
    periodSeconds: 10
    failureThreshold: 6
  # Traffic goes through it, so the pod is ready only when it is.
  startupProbe:
    tcpSocket: {port: http}
    periodSeconds: 1
    failureThreshold: 60
  readinessProbe:
    tcpSocket: {port: http}
    periodSeconds: 5
  {{- else }}
  # No probe, on purpose: it observes, and must neither hold the engine back nor take it out of service. The alert SidecarDown tells of one that hangs.
  {{- end }}
  securityContext: {{- include "handrail.containerSecurity" $root | nindent 4 }}
  resources: {{- toYaml $root.Values.sidecar.resources | nindent 4 }}
  volumeMounts:
    - {name: handrail-spool, mountPath: /var/lib/handrail}
    {{- if not $proxy }}
    - {name: handrail-run, mountPath: /run/handrail}
    {{- end }}
    {{- include "handrail.tlsMount" $root | nindent 4 }}
{{- end }}

{{/* What the pod needs under securityContext where there are secrets: so the sidecar can read them, and nobody else on the node. */}}
{{- define "handrail.podSecurity" -}}
{{- if or (include "handrail.secured" .) .Values.auth.secret }}
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
{{- end }}
{{- end }}

{{/* The list under the engine's env (mode plugin). Where yours sets PYTHONPATH or VLLM_PLUGINS already, add to them instead. */}}
{{- define "handrail.engineEnv" -}}
- {name: HANDRAIL_SOCKET, value: /run/handrail/engine.sock}
- {name: PYTHONPATH, value: /opt/handrail}
{{- end }}

{{/* The list under the engine's volumeMounts (mode plugin). */}}
{{- define "handrail.engineMounts" -}}
- {name: handrail-plugin, mountPath: /opt/handrail, readOnly: true}
- {name: handrail-run, mountPath: /run/handrail}
{{- end }}

{{/* The list under the pod's volumes. */}}
{{- define "handrail.volumes" -}}
- name: handrail-spool
  emptyDir: {sizeLimit: {{ .root.Values.sidecar.spoolVolume }}}
{{- if ne .mode "proxy" }}
- name: handrail-plugin
  emptyDir: {sizeLimit: 64Mi}
- name: handrail-run
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}
{{- include "handrail.tlsVolume" (dict "root" .root "part" "sidecar") }}
{{- end }}
