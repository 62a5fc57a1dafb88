// One board on one page, at Grafana's own sizes: 24 columns, rows of 30 pixels, 8 pixels between.
import React, { useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';
import { createTheme, dateTime, LoadingState, ThemeContext, type DataFrame } from '@grafana/data';
import { GlobalStyles, PanelChrome } from '@grafana/ui';
import { dataOf, Drawing } from './panels';
import { ask, interpolated, rangeOf, variablesOf, type Range } from './prometheus';
import { registerAll } from './registries';

const CELL = 30, GAP = 8, COLUMNS = 24, SIDE = 16, TOP = 96;
const theme = createTheme({ colors: { mode: 'dark' } });
const query = new URLSearchParams(location.search);
const width = window.innerWidth - 2 * SIDE;
const column = (width - GAP * (COLUMNS - 1)) / COLUMNS;
const page = window as any;
page.__errors = [];
window.addEventListener('error', (event) => page.__errors.push(String(event.message)));
window.addEventListener('unhandledrejection', (event) => page.__errors.push(String(event.reason)));
registerAll();

class Guard extends React.Component<{ children: React.ReactNode }, { error?: Error }> {
  state: { error?: Error } = {};
  static getDerivedStateFromError(error: Error) { return { error }; }
  render() { return this.state.error ? <pre className="failed">{String(this.state.error.stack).slice(0, 600)}</pre> : this.props.children; }
}

function Panel({ panel, variables, range }: { panel: any; variables: Record<string, string>; range: Range }) {
  const [data, setData] = useState<DataFrame[]>();
  const [error, setError] = useState<Error>();
  const { x, y, w, h } = panel.gridPos;
  const box = { left: SIDE + x * (column + GAP), top: TOP + y * (CELL + GAP), width: w * column + (w - 1) * GAP, height: h * CELL + (h - 1) * GAP };
  useEffect(() => { dataOf(panel, variables, rangeOf(range.start, range.end, range.scrape, box.width), theme).then(setData).catch(setError); }, []);
  if (panel.type === 'row') {
    return <div style={{ position: 'absolute', ...box, fontSize: 16, fontWeight: 500, lineHeight: '30px' }}>⌄ {panel.title}</div>;
  }
  const timeRange = { from: dateTime(range.start * 1000), to: dateTime(range.end * 1000), raw: { from: 'now-1h', to: 'now' } };
  const state = error ? 'error' : data ? 'done' : 'loading';
  return (
    <div className="panel" data-id={panel.id} data-title={panel.title} data-type={panel.type} data-state={state} data-frames={data?.length ?? 0} data-error={error?.message} style={{ position: 'absolute', ...box }}>
      <Guard>
        <PanelChrome title={panel.title} description={panel.description} width={box.width} height={box.height} loadingState={error ? LoadingState.Error : LoadingState.Done} statusMessage={error?.message}>
          {(w: number, h: number) => (error ? <pre className="failed">{error.message}</pre>
            : data ? <Guard><Drawing panel={panel} data={data} width={w} height={h} theme={theme} timeRange={timeRange} /></Guard> : <></>)}
        </PanelChrome>
      </Guard>
    </div>
  );
}

function Head({ board, options }: { board: any; options: Record<string, string[]> }) {
  const shown = board.templating.list.filter((variable: any) => variable.hide !== 2);
  const chip = { border: `1px solid ${theme.colors.border.medium}`, borderRadius: 2, padding: '4px 8px', marginRight: 8, background: theme.colors.background.primary };
  return (
    <div style={{ position: 'absolute', left: SIDE, top: 10, right: SIDE, height: TOP - 16, fontSize: 14 }}>
      <div style={{ display: 'flex', justifyContent: 'space-between', marginBottom: 12 }}>
        <b style={{ fontSize: 18 }}>{board.title}</b>
        <span>{board.links.map((link: any) => <span key={link.title} style={chip}>{link.title} {link.asDropdown ? '⌄' : '↗'}</span>)}</span>
      </div>
      {shown.map((variable: any) => <span key={variable.name} style={chip}><b>{variable.label}</b> {variable.type === 'datasource' ? 'Prometheus' : `All (${options[variable.name]?.length})`} ⌄</span>)}
      {board.annotations.list.map((each: any) => <span key={each.name} style={{ marginLeft: 16 }}><span style={{ color: each.iconColor }}>●</span> {each.name}</span>)}
    </div>
  );
}

async function main(): Promise<void> {
  const board = await (await fetch(`/boards/${query.get('board')}`)).json();
  const [start, end, scrape] = ['start', 'end', 'scrape'].map((name) => Number(query.get(name)));
  const range = rangeOf(start, end, scrape, width);
  const { values, options } = await variablesOf(board, range);
  page.__options = options;
  page.__annotations = await Promise.all(board.annotations.list.map(async (each: any) => {
    const found = await ask('query_range', { query: interpolated(each.expr, values, range), start: String(start), end: String(end), step: '30' });
    return [each.name, found.result.length];
  }));
  const bottom = Math.max(...board.panels.map((panel: any) => panel.gridPos.y + panel.gridPos.h));
  createRoot(document.getElementById('root')!).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ position: 'relative', height: TOP + bottom * (CELL + GAP), background: theme.colors.background.canvas, color: theme.colors.text.primary, fontFamily: 'Inter, Helvetica, Arial, sans-serif' }}>
        <Head board={board} options={options} />
        {board.panels.map((panel: any) => <Panel key={panel.id} panel={panel} variables={values} range={range} />)}
      </div>
    </ThemeContext.Provider>,
  );
  page.__rendering = board.panels.filter((panel: any) => panel.type !== 'row').length;
}

main().catch((error) => page.__errors.push(String(error.stack ?? error)));
