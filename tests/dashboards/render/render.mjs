// node render.mjs --prometheus URL --start S --end S --scrape S --out DIR BOARD.json ...
// Opens each board at 1440x900, waits until every panel is drawn, keeps a screenshot of the whole and prints one JSON object: what each panel shows.
import fs from 'node:fs';
import http from 'node:http';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { chromium } from 'playwright-core';

const here = path.dirname(fileURLToPath(import.meta.url));
const text = { type: 'string' };
const { values: flags, positionals: boards } = parseArgs({ allowPositionals: true, options: { prometheus: text, start: text, end: text, scrape: text, out: text, chromium: text } });
const types = { '.html': 'text/html', '.js': 'text/javascript', '.css': 'text/css', '.json': 'application/json' };

const server = http.createServer((request, answer) => {
  const { pathname, search } = new URL(request.url, 'http://localhost');
  if (pathname.startsWith('/prom/')) {
    const onward = http.request(new URL(pathname.slice(5) + search, flags.prometheus), { method: request.method, headers: { ...request.headers, host: new URL(flags.prometheus).host } }, (back) => {
      answer.writeHead(back.statusCode, back.headers);
      back.pipe(answer);
    });
    onward.on('error', (error) => answer.writeHead(502).end(String(error)));
    request.pipe(onward);
    return;
  }
  const board = boards.find((file) => pathname === `/boards/${path.basename(file)}`);
  const file = board ?? path.join(here, 'dist', pathname === '/' ? 'index.html' : path.normalize(pathname));
  fs.readFile(file, (error, content) => {
    if (error) answer.writeHead(404).end();
    else answer.writeHead(200, { 'content-type': types[path.extname(file)] ?? 'application/octet-stream' }).end(content);
  });
});
await new Promise((ready) => server.listen(0, '127.0.0.1', ready));

const drawn = () => document.querySelectorAll('.panel[data-state=done], .panel[data-state=error]').length >= (window.__rendering ?? Infinity) || (window.__errors?.length ?? 0) > 0;
const shown = () => [...document.querySelectorAll('.panel')].map((panel) => {
  const { x, y, width, height } = panel.getBoundingClientRect();
  const failed = panel.querySelector('.failed')?.textContent ?? panel.dataset.error ?? '';
  return { ...panel.dataset, frames: Number(panel.dataset.frames), failed, nothing: panel.querySelector('.nothing')?.textContent ?? null, text: panel.innerText, box: [x, y, width, height], canvases: panel.querySelectorAll('canvas').length };
});
const browser = await chromium.launch({
  executablePath: flags.chromium,
  args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
});
const found = {};
try {
  for (const file of boards) {
    const name = path.basename(file, '.json');
    const page = await browser.newPage({ viewport: { width: 1440, height: 900 } });
    const said = [];
    page.on('console', (message) => message.type() === 'error' && said.push(message.text().slice(0, 300)));
    const asked = new URLSearchParams({ board: path.basename(file), start: flags.start, end: flags.end, scrape: flags.scrape });
    await page.goto(`http://127.0.0.1:${server.address().port}/?${asked}`, { waitUntil: 'commit', timeout: 60_000 });
    await page.waitForFunction(drawn, undefined, { timeout: 180_000 });
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 500)))));
    const height = await page.evaluate(() => document.getElementById('root').firstElementChild?.getBoundingClientRect().height ?? 900);
    await page.setViewportSize({ width: 1440, height: Math.ceil(height) });
    await page.screenshot({ path: path.join(flags.out, `${name}.png`) });
    found[name] = { panels: await page.evaluate(shown), errors: await page.evaluate('window.__errors'), options: await page.evaluate('window.__options'), annotations: await page.evaluate('window.__annotations'), console: said, height };
    await page.close();
  }
} finally {
  await browser.close();
  server.closeAllConnections();
  server.close();
}
process.stdout.write(JSON.stringify(found));
