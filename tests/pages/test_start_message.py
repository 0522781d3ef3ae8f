"""What the server says at its start, and whom it asks for that: nobody."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
from streamlit import config, net_util
from streamlit.web import bootstrap

def asked(*_):
    raise SystemExit("asked for this machine's address")

net_util.get_external_ip = net_util.get_internal_ip = asked
bootstrap.load_config_options({"server.address": "0.0.0.0"})
bootstrap._print_url(False)
"""


def test_an_open_server_asks_nobody_for_its_address():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "http://localhost:8501" in done.stdout
