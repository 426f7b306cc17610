"""The health server: probes, status, metrics, drain and the dashboard."""
