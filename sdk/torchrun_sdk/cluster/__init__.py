"""What the client asks of the cluster, by kubectl and the plugin: jobs, Ray clusters, watches."""
