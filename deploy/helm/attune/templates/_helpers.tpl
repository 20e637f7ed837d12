{{- define "attune.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a role. Arguments: root, role. */}}
{{- define "attune.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "attune.labels" -}}
{{ include "attune.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* A setting as text, or its default. Arguments: root, path (section, name), default. */}}
{{- define "attune.setting" -}}
{{- $section := index .root.Values.settings (first .path) | default dict -}}
{{- if hasKey $section (last .path) -}}{{- index $section (last .path) -}}{{- else -}}{{- .default -}}{{- end -}}
{{- end -}}

{{/* Seconds that a reply may take to end after SIGTERM. */}}
{{- define "attune.shutdownSeconds" -}}
{{- include "attune.setting" (dict "root" . "path" (list "server" "shutdown_seconds") "default" 600) -}}
{{- end -}}

{{/* Where every role but the API serves /metrics. */}}
{{- define "attune.metricsPort" -}}
{{- include "attune.setting" (dict "root" . "path" (list "observability" "metrics_port") "default" 8720) -}}
{{- end -}}

{{/* Settings that the chart decides must not be in values.settings as well. */}}
{{- define "attune.checkSettings" -}}
{{- range list "home" "database.url" "database.owner_url" "broker.url" "limits.url" "secrets" "engine.name" "engine.host" "engine.port" "engine.api_key" "engine.admin_key" "engine.adapter_delivery" "engine.versions_url" "server.host" "server.port" "database.encryption_keys" -}}
{{- $parts := splitList "." . -}}
{{- $table := $.Values.settings -}}
{{- if gt (len $parts) 1 -}}{{- $table = index $.Values.settings (first $parts) | default dict -}}{{- end -}}
{{- if hasKey $table (last $parts) -}}
{{- fail (printf "settings.%s is set by the chart: use existingSecret for addresses with passwords and for keys, and engine.adapterDelivery for how versions are delivered" .) -}}
{{- end -}}
{{- end -}}
{{- $longest := include "attune.setting" (dict "root" . "path" (list "server" "chat_timeout_seconds") "default" 600) -}}
{{- if gt (float64 $longest) (float64 (include "attune.shutdownSeconds" .)) -}}
{{- fail (printf "settings.server.shutdown_seconds must be at least settings.server.chat_timeout_seconds (%s), or replies are cut when a pod is replaced" $longest) -}}
{{- end -}}
{{- end -}}

{{/* Without its metrics, SGLang never tells KEDA that requests wait. */}}
{{- define "attune.checkKeda" -}}
{{- $flags := index (index .Values.settings "engine" | default dict) "extra_flags" | default list -}}
{{- if not (or .Values.engine.keda.query (has "--enable-metrics" $flags)) -}}
{{- fail "engine.keda needs settings.engine.extra_flags with --enable-metrics, or a query of your own in engine.keda.query" -}}
{{- end -}}
{{- end -}}

{{/* attune.toml: values.settings and what the chart decides. */}}
{{- define "attune.toml" -}}
{{- include "attune.checkSettings" . -}}
{{- $settings := deepCopy .Values.settings -}}
{{- $server := index $settings "server" | default dict -}}
{{- $_ := set $server "host" "0.0.0.0" -}}
{{- $_ := set $server "port" 8700 -}}
{{- $_ := set $settings "server" $server -}}
{{- $engine := index $settings "engine" | default dict -}}
{{- $_ := set $engine "port" 8710 -}}
{{- $_ := set $engine "adapter_delivery" .Values.engine.adapterDelivery -}}
{{- $_ := set $settings "engine" $engine -}}
{{- $_ := set $settings "home" "/data" -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.scrapers -}}
{{- $observability := index $settings "observability" | default dict -}}
{{- $_ := set $settings "observability" (merge $observability (dict "metrics_host" "0.0.0.0")) -}}
{{- end -}}
{{ toToml $settings }}
{{- end -}}

{{/* Environment of a role: the keys of the Secret that it needs, and paths. Arguments: root, role. */}}
{{- define "attune.env" -}}
{{- $required := list "ATTUNE_DATABASE__URL" -}}
{{- if not (has .role (list "migration" "engine")) -}}{{- $required = append $required "ATTUNE_BROKER__URL" -}}{{- end -}}
{{- if eq .role "api" -}}{{- $required = append $required "ATTUNE_LIMITS__URL" -}}{{- end -}}
{{- if has .role (list "api" "engine" "worker" "publisher" "rollout" "trainer") -}}
{{- $required = concat $required (list "ATTUNE_ENGINE__API_KEY" "ATTUNE_ENGINE__ADMIN_KEY") -}}
{{- end -}}
{{- $optional := list -}}
{{- if has .role (list "api" "worker" "judge") -}}
{{- $optional = list "ATTUNE_DATABASE__ENCRYPTION_KEYS" "ATTUNE_SECRETS" -}}
{{- end -}}
{{- if eq .role "migration" -}}{{- $optional = list "ATTUNE_DATABASE__OWNER_URL" -}}{{- end -}}
{{- if has .role (list "engine" "trainer" "worker" "publisher") -}}{{- $optional = append $optional "HF_TOKEN" -}}{{- end -}}
- name: ATTUNE_CONFIG
  value: /etc/attune/attune.toml
- name: TRITON_CACHE_DIR
  value: /home/attune/.cache/triton
{{- range $required }}
- name: {{ . }}
  valueFrom: {secretKeyRef: {name: {{ $.root.Values.existingSecret }}, key: {{ . }}}}
{{- end }}
{{- range $optional }}
- name: {{ . }}
  valueFrom: {secretKeyRef: {name: {{ $.root.Values.existingSecret }}, key: {{ . }}, optional: true}}
{{- end }}
{{- end -}}

{{/* The image of a role. Arguments: root, role. */}}
{{- define "attune.image" -}}
{{- $image := ternary .root.Values.engineImage .root.Values.image (eq .role "engine") -}}
image: {{ printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) }}
imagePullPolicy: {{ $image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Metadata and everything of a pod's spec but its containers. Arguments: root, role, grace. */}}
{{- define "attune.pod" -}}
{{- $values := index .root.Values .role | default dict -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
{{- with .root.Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- if has .role (list "api" "engine") }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "attune.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{/* Whether a role has storage of its own instead of the shared one. */}}
{{- define "attune.ownStorage" -}}
{{- if or (has .role (list "beat" "migration")) (and (eq .role "engine") (eq .root.Values.engine.adapterDelivery "memory")) }}true{{ end -}}
{{- end -}}

{{- define "attune.volumes" -}}
- name: config
  configMap: {name: {{ include "attune.fullname" .root }}{{ if eq .role "migration" }}-migration{{ end }}}
- name: tmp
  emptyDir: {}
- name: cache
  emptyDir: {}
- name: data
{{- if include "attune.ownStorage" . }}
  emptyDir: {}
{{- else }}
  persistentVolumeClaim: {claimName: {{ default (include "attune.fullname" .root) .root.Values.storage.existingClaim }}}
{{- end }}
{{- with .root.Values.modelCache.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}}
{{- end }}
{{- if has .role (list "engine" "trainer") }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ (index .root.Values .role).sharedMemory }}}
{{- end }}
{{- end -}}

{{- define "attune.volumeMounts" -}}
- {name: config, mountPath: /etc/attune, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /home/attune/.cache}
- {name: data, mountPath: /data}
{{- if .root.Values.modelCache.existingClaim }}
- {name: models, mountPath: /home/attune/.cache/huggingface}
{{- end }}
{{- if has .role (list "engine" "trainer") }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- end -}}
