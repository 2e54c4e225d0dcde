"""What is known of the cluster: informers, their stores, and the views read of them."""
