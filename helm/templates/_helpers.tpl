{{/* Prefix of every resource's name. At most 34 characters: a pool's name comes after it, and names have 63. */}}
{{- define "rollouts.fullname" -}}
{{- $name := .Values.fullnameOverride | default .Release.Name -}}
{{- if gt (len $name) 34 -}}
{{- printf "%s-%s" ($name | trunc 27 | trimSuffix "-") (sha256sum $name | trunc 6) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end }}

{{/* Labels that never change. Arguments: root, component. */}}
{{- define "rollouts.selectorLabels" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
rollout-fleet/pool: {{ . | quote }}
{{- end }}
{{- with .door }}
rollout-fleet/door: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Arguments: root, component. */}}
{{- define "rollouts.labels" -}}
{{ include "rollouts.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "rollouts.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* What all pods have in common. Arguments: root, component. */}}
{{- define "rollouts.podSpec" -}}
serviceAccountName: {{ include "rollouts.fullname" .root }}-{{ .component }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "rollouts.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* One variable from a Secret. Arguments: name, secret, key. */}}
{{- define "rollouts.secretVariable" -}}
- name: {{ .name | quote }}
  valueFrom:
    secretKeyRef: {name: {{ .secret | quote }}, key: {{ .key | quote }}}
{{- end }}

{{- define "rollouts.sharedSecret" -}}
{{ include "rollouts.fullname" . }}-keys
{{- end }}

{{/* The value of a key that this chart makes up: what the Secret in the cluster has, else a random one. */}}
{{- define "rollouts.keptKey" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .secret | default dict -}}
{{- $data := get $found "data" | default dict -}}
{{- if hasKey $data .key -}}
{{- get $data .key | b64dec -}}
{{- else -}}
{{- randAlphaNum 40 -}}
{{- end -}}
{{- end }}

{{/* ROLLOUTS_REDIS_URL, as a list of one variable. */}}
{{- define "rollouts.redisVariable" -}}
{{- if eq .Values.redis.mode "bundled" -}}
{{ include "rollouts.secretVariable" (dict "name" "ROLLOUTS_REDIS_URL" "secret" (printf "%s-redis" (include "rollouts.fullname" .)) "key" "url") }}
{{- else if .Values.redis.external.existingSecret -}}
{{ include "rollouts.secretVariable" (dict "name" "ROLLOUTS_REDIS_URL" "secret" .Values.redis.external.existingSecret "key" .Values.redis.external.urlKey) }}
{{- else -}}
- name: ROLLOUTS_REDIS_URL
  value: {{ .Values.redis.external.url | quote }}
{{- end -}}
{{- end }}

{{/* The further settings, as variables. */}}
{{- define "rollouts.settings" -}}
{{- range $name, $value := .Values.settings }}
- name: ROLLOUTS_{{ upper $name }}
  value: {{ include "rollouts.number" $value | quote }}
{{- end }}
{{- end }}

{{/* A value as text: Helm has all numbers as floats, and would write a million as 1e+06. */}}
{{- define "rollouts.number" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{/* The gateway's control key, as a variable with the name that is given, or nothing. Arguments: root, name. */}}
{{- define "rollouts.controlKeyVariable" -}}
{{- $gateway := .root.Values.gateway -}}
{{- if $gateway.controlSecret.name -}}
{{ include "rollouts.secretVariable" (dict "name" .name "secret" $gateway.controlSecret.name "key" $gateway.controlSecret.key) }}
{{- else if eq $gateway.mode "bundled" -}}
{{ include "rollouts.secretVariable" (dict "name" .name "secret" (include "rollouts.sharedSecret" .root) "key" "control-key") }}
{{- end -}}
{{- end }}

{{/* JSON of all pools by name, each with what `worker` sets for all of them. */}}
{{- define "rollouts.pools" -}}
{{- $pools := dict -}}
{{- range $name, $own := (.Values.pools | default (dict "default" dict)) -}}
{{- $pool := include "rollouts.overlay" (list $.Values.worker $own) | fromJson -}}
{{- if not $pool.podDisruptionBudget }}{{ $_ := set $pool "podDisruptionBudget" dict }}{{ end -}}
{{- $_ := set $pools $name $pool -}}
{{- end -}}
{{- toJson $pools -}}
{{- end }}

{{/* JSON of the first object with the second one's fields over it; unlike mergeOverwrite, false, 0 and "" count too. */}}
{{- define "rollouts.overlay" -}}
{{- $merged := deepCopy (index . 0) -}}
{{- range $name, $value := (index . 1) -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $merged $name)) (not (has $name (list "podDisruptionBudget" "environments"))) -}}
{{- $_ := set $merged $name (include "rollouts.overlay" (list (get $merged $name) $value) | fromJson) -}}
{{- else -}}
{{- $_ := set $merged $name $value -}}
{{- end -}}
{{- end -}}
{{- toJson $merged -}}
{{- end }}

{{/* Whether KEDA scales any pool: "true" or nothing. */}}
{{- define "rollouts.scaled" -}}
{{- range (include "rollouts.pools" . | fromJson) }}{{ if .autoscaling.enabled }}true{{ end }}{{ end -}}
{{- end }}

{{/* Seconds in which a pool's pod drains and hands over. */}}
{{- define "rollouts.drainSeconds" -}}
{{- addf .drainTimeout .handoverTimeout | ceil | int -}}
{{- end }}

{{/* A pod's PodDisruptionBudget fields: 0 counts. */}}
{{- define "rollouts.budget" -}}
{{- if hasKey . "minAvailable" }}
minAvailable: {{ .minAvailable }}
{{- end }}
{{- if hasKey . "maxUnavailable" }}
maxUnavailable: {{ .maxUnavailable }}
{{- end }}
{{- end }}

{{/* Where pods may run. */}}
{{- define "rollouts.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Scratch space. Argument: its size limit. */}}
{{- define "rollouts.scratch" -}}
- name: scratch
  emptyDir: {sizeLimit: {{ . }}}
{{- end }}

{{- define "rollouts.scratchMounts" -}}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: /home/rollouts, subPath: home}
{{- end }}
