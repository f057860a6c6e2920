"""What an operator watches, over HTTP: metrics for Prometheus, the status, events as they happen, and a live page."""
