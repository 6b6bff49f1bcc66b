{{/* Variables of a worker. Arguments: root, pool. */}}
{{- define "rollouts.workerEnv" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $pool := .pool -}}
{{ include "rollouts.redisVariable" $root }}
- {name: ROLLOUTS_FLEET, value: {{ include "rollouts.fullname" $root | quote }}}
{{- include "rollouts.settings" $root }}
- {name: ROLLOUTS_QUEUES, value: {{ join "," $pool.queues | quote }}}
- {name: ROLLOUTS_CONCURRENCY, value: {{ include "rollouts.number" $pool.concurrency | quote }}}
- {name: ROLLOUTS_DRAIN_TIMEOUT, value: {{ include "rollouts.number" $pool.drainTimeout | quote }}}
- {name: ROLLOUTS_SANDBOX_PROVIDER, value: {{ $values.sandboxes.provider | quote }}}
- {name: ROLLOUTS_TUNNEL_PROVIDER, value: {{ $values.tunnels.provider | quote }}}
- {name: ROLLOUTS_ADMIN_HOST, value: 0.0.0.0}
- {name: ROLLOUTS_ADMIN_PORT, value: {{ $values.admin.port | quote }}}
{{ include "rollouts.secretVariable" (dict "name" "ROLLOUTS_ADMIN_TOKEN" "secret" (include "rollouts.adminSecret" $root) "key" (include "rollouts.adminKey" $root)) }}
{{ include "rollouts.workerGatewayEnv" $root }}
{{- with $pool.environments }}
{{- $listed := list }}
{{- range $name, $target := . }}{{ $listed = append $listed (printf "%s=%s" $name $target) }}{{ end }}
- {name: ROLLOUTS_ENVIRONMENTS, value: {{ join "," $listed | quote }}}
{{- end }}
{{- with $pool.agentSecrets.names }}
- {name: ROLLOUTS_SECRET_ENV, value: {{ join "," . | quote }}}
{{- range . }}
{{ include "rollouts.secretVariable" (dict "name" . "secret" $pool.agentSecrets.existingSecret "key" .) }}
{{- end }}
{{- end }}
{{- if has "prime" (list $values.sandboxes.provider $values.tunnels.provider) }}
{{ include "rollouts.primeEnv" $values.prime }}
{{- end }}
{{- with $pool.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "rollouts.workerGatewayEnv" -}}
{{- with .Values.gateway -}}
{{- if eq .mode "none" -}}
- {name: ROLLOUTS_USE_GATEWAY, value: "false"}
- {name: ROLLOUTS_MODEL_URL, value: {{ .upstream | quote }}}
{{- with .upstreamSecret }}{{ if .name }}
{{ include "rollouts.secretVariable" (dict "name" "ROLLOUTS_MODEL_API_KEY" "secret" .name "key" .key) }}
{{- end }}{{ end }}
{{- else -}}
- name: ROLLOUTS_GATEWAY_URL
  value: {{ .url | default (printf "http://%s-gateway:%d" (include "rollouts.fullname" $) (int .port)) | quote }}
{{- with include "rollouts.controlKeyVariable" (dict "root" $ "name" "ROLLOUTS_GATEWAY_CONTROL_KEY") }}
{{ . }}
{{- end }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "rollouts.primeEnv" -}}
{{ include "rollouts.secretVariable" (dict "name" "PRIME_API_KEY" "secret" .existingSecret "key" .apiKeyKey) }}
{{- with .teamId }}
- {name: PRIME_TEAM_ID, value: {{ . | quote }}}
{{- end }}
{{- with .baseUrl }}
- {name: PRIME_API_BASE_URL, value: {{ . | quote }}}
{{- end }}
{{- end }}

{{- define "rollouts.adminSecret" -}}
{{ .Values.admin.existingSecret | default (include "rollouts.sharedSecret" .) }}
{{- end }}

{{- define "rollouts.adminKey" -}}
{{ ternary .Values.admin.tokenKey "admin-token" (not (empty .Values.admin.existingSecret)) }}
{{- end }}
