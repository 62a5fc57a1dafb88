// What Grafana's Prometheus data source does with a panel's queries: variables, step, legends, frames.
import { FieldType, toDataFrame, type DataFrame } from '@grafana/data';

export interface Range { start: number; end: number; scrape: number; step: number }
type Variables = Record<string, string>;

export async function ask(path: string, query: Record<string, string>): Promise<any> {
  const answer = await fetch(`/prom/api/v1/${path}`, { method: 'POST', body: new URLSearchParams(query) });
  const body = await answer.json();
  if (body.status !== 'success') throw new Error(body.error);
  return body.data;
}

// A step is what fits the panel's pixels, never below the scrape interval; a rate's window holds four scrapes.
export function rangeOf(start: number, end: number, scrape: number, pixels: number): Range {
  const nice = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600].find((s) => s >= Math.max(scrape, (end - start) / pixels)) ?? 3600;
  return { start, end, scrape, step: Math.max(nice, scrape) };
}

export function interpolated(text: string, variables: Variables, range: Range): string {
  const builtIn: Variables = {
    __rate_interval: `${Math.max(range.step + range.scrape, 4 * range.scrape)}s`,
    __interval: `${range.step}s`,
    __range: `${Math.round(range.end - range.start)}s`,
  };
  const value = (name: string) => builtIn[name] ?? variables[name];
  return text.replace(/\$\{(\w+)(?::[^}]*)?\}|\$(\w+)/g, (whole, braced, bare) => value(braced ?? bare) ?? whole);
}

const legendOf = (format: string | undefined, metric: Variables) =>
  format ? format.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => metric[label] ?? '') : JSON.stringify(metric);

export async function framesOf(target: any, several: boolean, variables: Variables, range: Range): Promise<DataFrame[]> {
  const query = interpolated(target.expr, variables, range);
  if (target.format === 'table') {
    const { result } = await ask('query', { query, time: String(range.end) });
    return result.length ? [tableFrame(target.refId, several ? `Value #${target.refId}` : 'Value', result)] : [];
  }
  if (target.instant) {
    const { result } = await ask('query', { query, time: String(range.end) });
    return result.map((each: any) => seriesFrame(target, each.metric, [each.value]));
  }
  const { start, end, step } = range;
  const { result } = await ask('query_range', { query, start: String(start), end: String(end), step: String(step) });
  return result.map((each: any) => seriesFrame(target, each.metric, each.values));
}

function seriesFrame(target: any, metric: Variables, values: Array<[number, string]>): DataFrame {
  const name = legendOf(target.legendFormat, metric);
  return toDataFrame({
    refId: target.refId,
    name,
    fields: [
      { name: 'Time', type: FieldType.time, values: values.map(([at]) => at * 1000) },
      { name: 'Value', type: FieldType.number, labels: metric, config: { displayNameFromDS: name }, values: values.map(([, value]) => Number(value)) },
    ],
  });
}

function tableFrame(refId: string, value: string, result: any[]): DataFrame {
  const labels = [...new Set(result.flatMap((each) => Object.keys(each.metric)))];
  return toDataFrame({
    refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: result.map((each) => each.value[0] * 1000) },
      ...labels.map((label) => ({ name: label, type: FieldType.string, values: result.map((each) => each.metric[label]) })),
      { name: value, type: FieldType.number, values: result.map((each) => Number(each.value[1])) },
    ],
  });
}

// The board's variables as they stand when it is opened: "all" where there is one.
export async function variablesOf(board: any, range: Range): Promise<{ values: Variables; options: Record<string, string[]> }> {
  const values: Variables = {};
  const options: Record<string, string[]> = {};
  for (const variable of board.templating.list) {
    if (variable.type === 'query') {
      const [, selector, label] = /^label_values\((?:(.+),\s*)?(\w+)\)$/.exec(variable.query)!;
      const match: Record<string, string> = selector ? { 'match[]': interpolated(selector, values, range) } : {};
      const asked = await fetch(`/prom/api/v1/label/${label}/values?${new URLSearchParams(match)}`);
      options[variable.name] = (await asked.json()).data ?? [];
      values[variable.name] = variable.includeAll ? variable.allValue : options[variable.name][0];
    } else if (variable.type !== 'datasource') {
      values[variable.name] = variable.current?.value ?? variable.query;
    }
  }
  return { values, options };
}
