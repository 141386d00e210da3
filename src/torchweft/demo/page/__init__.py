"""The demo's page: one HTML file with its pictures inside."""
