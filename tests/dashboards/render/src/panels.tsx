// One panel as Grafana's plugins draw it, from Grafana's own components. The plugins themselves are not published.
import React from 'react';
import { applyFieldOverrides, getDisplayValueAlignmentFactors, getFieldDisplayValues, renderTextPanelMarkdown, transformDataFrame, type DataFrame } from '@grafana/data';
import * as UI from '@grafana/ui';
import { lastValueFrom } from 'rxjs';
import { fieldOptionsOf } from './registries';
import { framesOf, type Range } from './prometheus';

const U = UI as any;
const replaceVariables = (text: string) => text;

export async function dataOf(panel: any, variables: Record<string, string>, range: Range, theme: any): Promise<DataFrame[]> {
  const targets = panel.targets ?? [];
  let frames = (await Promise.all(targets.map((t: any) => framesOf(t, targets.length > 1, variables, range)))).flat();
  if (panel.transformations?.length && frames.length) frames = await lastValueFrom(transformDataFrame(panel.transformations, frames));
  const palette = panel.type === 'timeseries' ? { color: { mode: 'palette-classic' } } : {};
  const fieldConfig = { overrides: [], ...panel.fieldConfig, defaults: { ...palette, ...panel.fieldConfig?.defaults } };
  return applyFieldOverrides({ data: frames, fieldConfig, replaceVariables, theme, fieldConfigRegistry: fieldOptionsOf(panel.type) as any, timeZone: 'utc' });
}

interface Props { panel: any; data: DataFrame[]; width: number; height: number; theme: any; timeRange: any }

function Nothing({ panel }: { panel: any }) {
  const text = panel.fieldConfig?.defaults?.noValue ?? 'No data';
  return <div className="nothing" style={{ height: '100%', display: 'flex', alignItems: 'center', justifyContent: 'center', textAlign: 'center', opacity: 0.7 }}>{text}</div>;
}

function values({ panel, data, theme }: Props): any[] {
  const reduceOptions = { calcs: ['lastNotNull'], values: false, ...panel.options?.reduceOptions };
  const sparkline = panel.type === 'stat' && panel.options?.graphMode !== 'none';
  return getFieldDisplayValues({ fieldConfig: { overrides: [], ...panel.fieldConfig }, reduceOptions, data, theme, replaceVariables, sparkline, timeZone: 'utc' });
}

export function Drawing(props: Props) {
  const { panel, data, width, height, theme, timeRange } = props;
  if (panel.type === 'text') {
    return <div className="markdown-html" style={{ padding: '0 8px', fontSize: 14 }} dangerouslySetInnerHTML={{ __html: renderTextPanelMarkdown(panel.options.content) }} />;
  }
  if (panel.type === 'stat') {
    return <U.VizRepeater getValues={() => values(props)} source={data} width={width} height={height} orientation="auto" itemSpacing={3} autoGrid renderCounter={0}
      renderValue={({ value, width: w, height: h, count }: any) => (
        <U.BigValue value={value.display} sparkline={value.sparkline} width={w} height={h} count={count} theme={theme}
          colorMode={panel.options.colorMode} graphMode={panel.options.graphMode} textMode={panel.options.textMode} justifyMode={panel.options.justifyMode} />)} />;
  }
  if (!data.length || data.every((frame) => frame.length === 0)) return <Nothing panel={panel} />;
  if (panel.type === 'timeseries') {
    return <U.TimeSeries frames={data} structureRev={1} timeRange={timeRange} timeZone="utc" width={width} height={height} legend={{ calcs: [], ...panel.options.legend }}
      options={panel.options} replaceVariables={replaceVariables} />;
  }
  if (panel.type === 'bargauge') {
    return <U.VizRepeater getValues={() => values(props)} getAlignmentFactors={getDisplayValueAlignmentFactors} source={data} width={width} height={height} orientation="horizontal" itemSpacing={8} minVizHeight={16} maxVizHeight={40} renderCounter={0}
      renderValue={({ value, width: w, height: h, alignmentFactors }: any) => (
        <U.BarGauge value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)} width={w} height={h} theme={theme}
          alignmentFactors={alignmentFactors} orientation="horizontal" displayMode={panel.options.displayMode} itemSpacing={8} lcdCellWidth={12} showUnfilled={panel.options.showUnfilled} valueDisplayMode={panel.options.valueMode} />)} />;
  }
  if (panel.type === 'table') {
    return <U.Table data={data[0]} width={width} height={height} initialSortBy={panel.options.sortBy} cellHeight={panel.options.cellHeight} />;
  }
  throw new Error(`a panel of type ${panel.type} cannot be rendered here`);
}
