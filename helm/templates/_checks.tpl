{{/* Refuses values that cannot work together, each with what to do. The schema refuses what is wrong by itself. */}}
{{- define "rollouts.checks" -}}
{{- include "rollouts.checkNames" . -}}
{{- include "rollouts.checkRedis" . -}}
{{- include "rollouts.checkGateway" . -}}
{{- include "rollouts.checkProviders" . -}}
{{- include "rollouts.checkPools" . -}}
{{- include "rollouts.checkDoors" . -}}
{{- include "rollouts.checkVariables" . -}}
{{- if and .Values.flower.enabled (not .Values.flower.existingSecret) -}}
{{- fail "flower.existingSecret is empty: Flower shows and stops tasks, so it wants a password. Make a Secret with USER:PASSWORD under the key basic-auth and name it there" -}}
{{- end -}}
{{- end }}

{{- define "rollouts.checkNames" -}}
{{- $name := include "rollouts.fullname" . -}}
{{- $services := or (eq .Values.gateway.mode "bundled") (eq .Values.redis.mode "bundled") .Values.flower.enabled .Values.envServers -}}
{{- if and $services (not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name)) -}}
{{- fail (printf "%s can be no Service's name, which begins with a letter and has no dot: choose another name for the release, or set fullnameOverride" $name) -}}
{{- end -}}
{{- range $kind := list "pools" "envServers" -}}
{{- range $name, $_ := (get $.Values $kind | default dict) -}}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]{0,18}[a-z0-9])?$" $name) -}}
{{- fail (printf "%s.%s: its name becomes a part of names in Kubernetes, so it has lower-case letters, digits and dashes inside, 20 at most" $kind $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "rollouts.checkRedis" -}}
{{- $redis := .Values.redis -}}
{{- if eq $redis.mode "external" -}}
{{- if not (or $redis.external.url $redis.external.existingSecret) -}}
{{- fail "there is no Redis: set redis.external.existingSecret to a Secret that holds its URL (or redis.external.url if it needs no password), or redis.mode=bundled for a trial" -}}
{{- end -}}
{{- if and $redis.external.url $redis.external.existingSecret -}}
{{- fail "redis.external.url and redis.external.existingSecret are both set: keep one of them" -}}
{{- end -}}
{{- if regexMatch "@|[?&](username|password)=" ($redis.external.url | default "") -}}
{{- fail "redis.external.url holds a password, which everybody who may read the Deployment could see: put the URL into a Secret and name it in redis.external.existingSecret" -}}
{{- end -}}
{{- else if or $redis.external.url $redis.external.existingSecret -}}
{{- fail "redis.mode is bundled, and redis.external names another Redis: set redis.mode=external to use that one, or leave redis.external out" -}}
{{- end -}}
{{- end }}

{{- define "rollouts.checkGateway" -}}
{{- $gateway := .Values.gateway -}}
{{- range $name := list "url" "upstream" -}}
{{- if regexMatch "//[^/,]*@" (get $gateway $name | default "") -}}
{{- fail (printf "gateway.%s holds a password, which everybody who may read the pods could see: put it into a Secret, and name that in gateway.%s" $name (ternary "controlSecret" "upstreamSecret" (eq $name "url"))) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $gateway.mode "external") (not $gateway.url) -}}
{{- fail "gateway.mode is external, and gateway.url is empty: set it to the gateway's URL, or gateway.mode=bundled" -}}
{{- end -}}
{{- if and (ne $gateway.mode "external") $gateway.url -}}
{{- fail (printf "gateway.url is set, and gateway.mode is %s: set gateway.mode=external to use it" $gateway.mode) -}}
{{- end -}}
{{- if and (ne $gateway.mode "external") (not $gateway.upstream) -}}
{{- fail "gateway.upstream is empty: set it to your model server, such as http://vllm:8000/v1" -}}
{{- end -}}
{{- with $gateway.terminationGracePeriodSeconds -}}
{{- $least := include "rollouts.gatewayGrace" $ | int -}}
{{- if lt (int .) $least -}}
{{- fail (printf "gateway.terminationGracePeriodSeconds is %d, and the gateway needs %d to end (shutdownGrace and 15 s): leave it out, or lower gateway.shutdownGrace" (int .) $least) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "rollouts.checkProviders" -}}
{{- if and (eq .Values.sandboxes.provider "local") (not .Values.sandboxes.allowLocal) -}}
{{- fail "sandboxes.provider is local, which isolates nothing: agents run in the worker's pod and see its keys. Set sandboxes.allowLocal=true if all agents are trusted, or use sandboxes.provider=prime" -}}
{{- end -}}
{{- if and (has "prime" (list .Values.sandboxes.provider .Values.tunnels.provider)) (not .Values.prime.existingSecret) -}}
{{- fail "prime.existingSecret is empty: make a Secret with the platform's API key under the key api-key and name it there, or use other sandboxes.provider and tunnels.provider" -}}
{{- end -}}
{{- if and (eq .Values.sandboxes.provider "prime") (eq .Values.tunnels.provider "direct") (ne .Values.gateway.mode "external") -}}
{{- fail (printf "tunnels.provider is direct, and the platform's sandboxes cannot reach into this cluster (gateway.mode=%s): set tunnels.provider=prime, or gateway.mode=external with a gateway.url that they can reach" .Values.gateway.mode) -}}
{{- end -}}
{{- end }}

{{- define "rollouts.checkDoors" -}}
{{- $served := list -}}
{{- range (include "rollouts.pools" . | fromJson) -}}{{- $served = concat $served .queues -}}{{- end -}}
{{- range $name, $door := (include "rollouts.doors" . | fromJson) -}}
{{- if not (and $.Values.networkPolicy.enabled $.Values.networkPolicy.envServerFrom) -}}
{{- fail (printf "envServers.%s knows no password: whoever reaches it can run episodes. Name in networkPolicy.envServerFrom who may (entries of from), and leave networkPolicy.enabled true" $name) -}}
{{- end -}}
{{- if not (has $door.queue $served) -}}
{{- fail (printf "envServers.%s is of queue %s, which no pool serves: its episodes would wait for ever. Set its queue to one of %s, or name it in a pool's queues" $name $door.queue (uniq $served | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Kubernetes would silently take the last of two variables of one name. */}}
{{- define "rollouts.checkVariables" -}}
{{- range $name, $pool := (include "rollouts.pools" . | fromJson) -}}
{{- include "rollouts.checkTwice" (dict "env" (include "rollouts.workerEnv" (dict "root" $ "pool" $pool)) "whose" (printf "pool %s has" $name) "where" "env and agentSecrets.names") -}}
{{- end -}}
{{- if eq .Values.gateway.mode "bundled" -}}
{{- include "rollouts.checkTwice" (dict "env" (include "rollouts.gatewayEnv" .) "whose" "the gateway has" "where" "gateway.env") -}}
{{- end -}}
{{- end }}

{{/* Arguments: env, whose, where. */}}
{{- define "rollouts.checkTwice" -}}
{{- $seen := dict -}}
{{- range (.env | fromYamlArray) -}}
{{- if hasKey $seen .name -}}
{{- fail (printf "%s the variable %s twice: keep it once in %s, and leave it out there if the chart makes it from other values" $.whose .name $.where) -}}
{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}
{{- end }}

{{- define "rollouts.checkPools" -}}
{{- $offers := dict -}}
{{- $keda := false -}}
{{- range $name, $pool := (include "rollouts.pools" . | fromJson) -}}
{{- with $pool.terminationGracePeriodSeconds -}}
{{- $least := include "rollouts.drainSeconds" $pool | int -}}
{{- if lt (int .) $least -}}
{{- fail (printf "terminationGracePeriodSeconds of pool %s is %d, and its pods need %d to drain (drainTimeout + handoverTimeout): rollouts would be killed. Leave it out, or lower drainTimeout" $name (int .) $least) -}}
{{- end -}}
{{- end -}}
{{- if and $pool.agentSecrets.names (not $pool.agentSecrets.existingSecret) -}}
{{- fail (printf "pool %s names agentSecrets (%s) without agentSecrets.existingSecret: name the Secret that holds them" $name (join ", " $pool.agentSecrets.names)) -}}
{{- end -}}
{{- if and $pool.autoscaling.enabled (lt (int $pool.autoscaling.maxReplicas) (int $pool.autoscaling.minReplicas)) -}}
{{- fail (printf "autoscaling.maxReplicas of pool %s is %d, less than minReplicas (%d)" $name (int $pool.autoscaling.maxReplicas) (int $pool.autoscaling.minReplicas)) -}}
{{- end -}}
{{- if and (hasKey $pool.podDisruptionBudget "minAvailable") (hasKey $pool.podDisruptionBudget "maxUnavailable") -}}
{{- fail (printf "podDisruptionBudget of pool %s has both minAvailable and maxUnavailable, and Kubernetes takes one of them: set the other to null" $name) -}}
{{- end -}}
{{- range $environment, $_ := $pool.environments -}}
{{- if not (regexMatch "^[^=,\\s]+$" $environment) -}}
{{- fail (printf "environment %q of pool %s: its name has no space, comma or equals sign" $environment $name) -}}
{{- end -}}
{{- end -}}
{{- range $queue := $pool.queues -}}
{{- $first := get $offers $queue | default dict -}}
{{- if and $first (ne (toJson $first.environments) (toJson $pool.environments)) -}}
{{- fail (printf "pools %s and %s serve queue %s and offer different environments: a rollout would fail in the one that lacks its own. Set worker.environments for all of them" $first.name $name $queue) -}}
{{- end -}}
{{- $_ := set $offers $queue (dict "name" $name "environments" $pool.environments) -}}
{{- end -}}
{{- $keda = or $keda $pool.autoscaling.enabled -}}
{{- end -}}
{{- $external := .Values.redis.external -}}
{{- if and $keda (eq .Values.redis.mode "external") $external.existingSecret (not $external.address) -}}
{{- fail "autoscaling is enabled, and redis.external.address is empty: KEDA reads no URL; set it to HOST:PORT of the Redis in redis.external.existingSecret (and redis.external.passwordKey, database and tls as they are)" -}}
{{- end -}}
{{- end }}
