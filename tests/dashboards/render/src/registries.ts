// What Grafana registers at its start, as far as panels need it: transformers, and the options of fields.
import * as data from '@grafana/data';

const D = data as any;
const option = (id: string, process: unknown, defaultValue?: unknown, category = 'Standard options') => ({
  id, path: id, name: id, description: '', category: [category], settings: {}, defaultValue, process,
  editor: () => null, override: () => null, shouldApply: () => true,
});
const standard = [
  option('unit', D.unitOverrideProcessor), option('min', D.numberOverrideProcessor), option('max', D.numberOverrideProcessor),
  option('decimals', D.numberOverrideProcessor), option('displayName', D.displayNameOverrideProcessor),
  option('noValue', D.stringOverrideProcessor), option('color', D.identityOverrideProcessor),
  option('thresholds', D.thresholdsOverrideProcessor), option('mappings', D.valueMappingsOverrideProcessor, []),
  option('links', D.dataLinksOverrideProcessor), option('fieldMinMax', D.booleanOverrideProcessor),
  option('filterable', D.booleanOverrideProcessor),
];
const custom: Record<string, Record<string, unknown>> = {
  timeseries: {
    lineWidth: 1, fillOpacity: 0, drawStyle: 'line', lineInterpolation: 'linear', lineStyle: undefined, showPoints: 'auto', pointSize: 5,
    stacking: undefined, axisPlacement: 'auto', spanNulls: false, barAlignment: 0, gradientMode: 'none', hideFrom: undefined,
    thresholdsStyle: { mode: 'off' }, scaleDistribution: { type: 'linear' }, axisLabel: '', axisColorMode: 'text', insertNulls: false,
    axisBorderShow: false, axisCenteredZero: false,
  },
  table: { cellOptions: { type: 'auto' }, align: 'auto', width: undefined, minWidth: undefined, inspect: false, hideFrom: undefined },
};
const made: Record<string, unknown> = {};

export function registerAll(): void {
  const transformers = [...new Map(Object.values(D.standardTransformers).map((t: any) => [t.id, t])).values()] as any[];
  D.standardTransformersRegistry.setInit(() =>
    transformers.map((t) => ({ id: t.id, name: t.name, description: '', editor: () => null, transformation: () => Promise.resolve(t) })));
  D.standardFieldConfigEditorRegistry.setInit(() => standard);
  D.standardEditorsRegistry?.setInit?.(() => []);
}

export function fieldOptionsOf(kind: string): unknown {
  if (!custom[kind]) return D.standardFieldConfigEditorRegistry;
  if (!made[kind]) {
    const plugin = new D.PanelPlugin(() => null);
    plugin.useFieldConfig({
      useCustomConfig: (builder: any) => {
        for (const [id, defaultValue] of Object.entries(custom[kind])) builder.addCustomEditor(option(id, (value: unknown) => value, defaultValue, kind));
      },
    });
    made[kind] = plugin.fieldConfigRegistry;
  }
  return made[kind];
}
