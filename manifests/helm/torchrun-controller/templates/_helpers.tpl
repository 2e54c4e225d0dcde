{{- define "torchrun.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /*
Of the Deployment, whose selector never changes: that of the plain manifests, so that Helm can take over
what they installed. The Deployments of two releases in one namespace do not interfere: each owns its
ReplicaSets, and these select by pod-template-hash.
*/ -}}
{{- define "torchrun.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
{{- end -}}

{{- /* Of everything else that selects pods: those of this release only. */ -}}
{{- define "torchrun.pods" -}}
{{ include "torchrun.selector" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "torchrun.labels" -}}
{{ include "torchrun.pods" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{- define "torchrun.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "torchrun.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "torchrun.image" -}}
{{- with .Values.image -}}
{{- .repository -}}
{{- if .digest -}}
@{{ .digest }}
{{- else -}}
:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "torchrun.progress" -}}
{{- if kindIs "invalid" .Values.progress -}}
{{- if not .Values.singleNamespace }}true{{ end -}}
{{- else if .Values.progress -}}
true
{{- end -}}
{{- end -}}
