{{- define "kvasir.name" -}}
{{- if contains "kvasir" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvasir" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvasir.selector" -}}
app.kubernetes.io/name: kvasir
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvasir.labels" -}}
{{ include "kvasir.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvasir.account" -}}
{{ .Values.serviceAccount.name | default (include "kvasir.name" .) }}
{{- end }}

{{- define "kvasir.secret" -}}
{{ .Values.admin.existingSecret | default (printf "%s-admin" (include "kvasir.name" .)) }}
{{- end }}
