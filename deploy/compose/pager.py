"""Print the alerts that Alertmanager's webhooks deliver, one line an alert.

It stands in for the person on call.
"""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer


class Pager(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        for alert in body["alerts"]:
            labels, annotations = alert["labels"], alert.get("annotations", {})
            print(self.path.strip("/"), alert["status"], labels.get("alertname"), annotations.get("summary", ""), flush=True)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the log line that the server writes for each request."""


HTTPServer(("127.0.0.1", 9095), Pager).serve_forever()
