"""The health server: a Starlette app (probes, status, metrics, drain, pause, the dashboard), and the servers that it
runs on.

On asyncio that is uvicorn, on trio anycorn. Connections are limited in number and in time, and one place is kept for
probes, so that they are answered whatever else is connected. The group starts the server as a task of its own scope.
"""
