{{/* Where the gateway's journal is mounted. */}}
{{- define "rollouts.journal" -}}
/var/lib/rollouts
{{- end }}

{{/* Variables of the gateway. */}}
{{- define "rollouts.gatewayEnv" -}}
{{- $gateway := .Values.gateway -}}
- {name: ROLLOUTS_GATEWAY_HOST, value: 0.0.0.0}
- {name: ROLLOUTS_GATEWAY_PORT, value: {{ $gateway.port | quote }}}
- {name: ROLLOUTS_GATEWAY_UPSTREAM, value: {{ $gateway.upstream | quote }}}
- {name: ROLLOUTS_GATEWAY_SHUTDOWN_GRACE, value: {{ include "rollouts.number" $gateway.shutdownGrace | quote }}}
{{ include "rollouts.controlKeyVariable" (dict "root" . "name" "ROLLOUTS_GATEWAY_CONTROL_KEY") }}
{{- with $gateway.upstreamSecret }}{{ if .name }}
{{ include "rollouts.secretVariable" (dict "name" "ROLLOUTS_GATEWAY_UPSTREAM_API_KEY" "secret" .name "key" .key) }}
{{- end }}{{ end }}
{{- if $gateway.persistence.enabled }}
- {name: ROLLOUTS_GATEWAY_JOURNAL, value: {{ include "rollouts.journal" . }}}
{{- end }}
{{- with get (.Values.settings | default dict) "log_format" }}
- {name: ROLLOUTS_LOG_FORMAT, value: {{ . | quote }}}
{{- end }}
{{- with $gateway.env }}
{{ toYaml . }}
{{- end }}
{{- end }}
