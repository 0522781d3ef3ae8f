"""Plumbline's analytic modules: pure functions from a model, a plan and a machine to a breakdown. Never torch or streamlit."""
