{{/* Seconds that the gateway's pod needs to end: preStop, calls in flight, and its own end. */}}
{{- define "rollouts.gatewayGrace" -}}
{{- addf .Values.gateway.shutdownGrace 15 | ceil | int -}}
{{- end }}
